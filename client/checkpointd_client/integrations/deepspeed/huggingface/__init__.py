"""Hugging Face's Trainer and Accelerate, beside DeepSpeed's engines."""
