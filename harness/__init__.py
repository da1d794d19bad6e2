"""An experiment harness for data-parallel training of Hugging Face models with DeepSpeed."""
