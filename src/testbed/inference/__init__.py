"""Using a trained model."""

from testbed.inference.loading import load_model

__all__ = ["load_model"]
