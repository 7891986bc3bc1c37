"""Imports DeepSpeed and Accelerate and initializes DeepSpeed on the CPU. Fails if that is impossible."""
import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
import socket

with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(s.getsockname()[1])
import accelerate
import deepspeed

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # skips its compilation
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
print("setup-tests: deepspeed", deepspeed.__version__, "accelerate", accelerate.__version__)
