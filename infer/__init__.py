"""Speculative decoding with the model's own MTP head, and what a caller needs around it."""

from infer.generator import Generation as Generation
from infer.generator import Generator as Generator
