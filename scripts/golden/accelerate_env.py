#!/usr/bin/env python3
"""Records the environment variables that Accelerate's launcher sets.

    ~/.cache/launch-tests/deepspeed/bin/python scripts/golden/accelerate_env.py

Writes NAME.env.json for each NAME.yaml in launcher/tests/import/accelerate. Needs Accelerate and torch,
which scripts/setup-tests installs.
"""
import json
import os
import pathlib
import sys

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "launcher/tests/import/accelerate"
# Variables that depend on the machine or the time, not on the config.
MACHINE_DEPENDENT = {"OMP_NUM_THREADS", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
                 "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"}


def compute_launcher_environment(config):
    """Returns the variables that `accelerate launch` sets for this config, except those of the
    machine."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    prepare.is_port_in_use = lambda port=None: False
    # The launcher only checks whether the libraries for fp8 are installed, which needs a GPU.
    prepare.is_fp8_available = lambda: True
    parser = launch.launch_command_parser()
    args = parser.parse_args(["--config_file", str(config), "train.py"])
    args, _, _ = launch._validate_launch_command(args)
    # the same dispatch as in accelerate.commands.launch.launch_command
    if args.use_deepspeed and not args.cpu:
        args.deepspeed_fields_from_accelerate_config = ",".join(read_deepspeed_fields(args, config))
        _, env = prepare.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.use_megatron_lm or (args.multi_gpu and not args.cpu):
        env = prepare.prepare_multi_gpu_env(args)
    else:
        _, env = prepare.prepare_simple_launcher_cmd_env(args)
    return {k: v for k, v in sorted(env.items()) if os.environ.get(k) != v and k not in MACHINE_DEPENDENT}


def read_deepspeed_fields(args, config):
    """Returns the keys of the config's DeepSpeed section, as `accelerate launch` passes them on."""
    from accelerate.commands.config import load_config_from_file

    defaults = load_config_from_file(str(config))
    keys = list(defaults.deepspeed_config.keys()) if defaults.deepspeed_config else []
    if defaults.mixed_precision is not None:
        keys.append("mixed_precision")
    return keys


if __name__ == "__main__":
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_", "OMP_"))]:
        del os.environ[name]
    import accelerate

    for config in sorted(CONFIGS.glob("*.yaml")):
        if config.name.endswith(".job.yaml"):
            continue
        env = {"_accelerate": accelerate.__version__, **compute_launcher_environment(config)}
        config.with_suffix(".env.json").write_text(json.dumps(env, indent=1) + "\n")
        print(config.name, len(env), file=sys.stderr)
