"""Enables FSDP2 in Accelerate on CPUs. Accelerate only offers it on GPUs, so this sets the plugin
directly. Accelerate's code that reads and writes files is unchanged."""
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def enable_fsdp(accelerator, kind):
    """Enables FSDP2 in an Accelerator. `kind` is the form of the saved state: `full` or
    `sharded`."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=f"{kind.upper()}_STATE_DICT", cpu_ram_efficient_loading=False)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
