"""FSDP2 inside Accelerate on CPUs. Accelerate offers it on GPUs alone: its plugin is set by hand, all that writes and reads
files is as it was."""
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def put_into(accelerator, kind):
    """`kind`: `full` or `sharded`, the form of the saved state."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=f"{kind.upper()}_STATE_DICT", cpu_ram_efficient_loading=False)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
