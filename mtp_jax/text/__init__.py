"""Text to ids and back: tokenizer.json, chat templates, end ids, and training a small BPE."""

from mtp_jax.text.bpe import SPECIAL_TOKENS as SPECIAL_TOKENS
from mtp_jax.text.bpe import train_bpe as train_bpe
from mtp_jax.text.chat_template import ChatTemplate as ChatTemplate
from mtp_jax.text.stop import end_ids as end_ids
from mtp_jax.text.tokenizer import Tokenizer as Tokenizer
