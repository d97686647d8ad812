"""The published checkpoint format: config.json and safetensors files, read and written without losing a tensor."""

from mtp_jax.hf.config_json import config_from_json as config_from_json
from mtp_jax.hf.config_json import config_to_json as config_to_json
from mtp_jax.hf.graft import graft_head as graft_head
from mtp_jax.hf.load import Checkpoint as Checkpoint
from mtp_jax.hf.load import load_checkpoint as load_checkpoint
from mtp_jax.hf.load import read_config as read_config
from mtp_jax.hf.load import read_manifest as read_manifest
from mtp_jax.hf.load import read_params as read_params
from mtp_jax.hf.manifest import Manifest as Manifest
from mtp_jax.hf.save import save_checkpoint as save_checkpoint
from mtp_jax.hf.save import save_head as save_head
