"""What tests share: examples, stand-ins and workers."""
