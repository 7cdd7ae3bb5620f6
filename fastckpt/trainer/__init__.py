"""The parts of `fastckpt.huggingface`: which files a transformers Trainer saves, and where it finds them again."""
