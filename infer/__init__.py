"""Speculative decoding with the model's own MTP head, and what a caller needs around it."""

from infer.completion import Completion as Completion
from infer.generator import Generator as Generator
from infer.sampling import Sampling as Sampling
