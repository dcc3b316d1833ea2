"""Makes Hugging Face's Trainer and Accelerate work with attached DeepSpeed engines."""
