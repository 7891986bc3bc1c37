#!/usr/bin/env python3
"""What Accelerate's own launcher puts into the environment for each config in launcher/tests/import/accelerate.

Writes NAME.env.json beside NAME.yaml. Run with the Python environment that has Accelerate and torch
(scripts/setup-tests makes one): ~/.cache/launch-tests/deepspeed/bin/python scripts/golden/accelerate_env.py
"""
import json
import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "launcher/tests/import/accelerate"
# What the launcher decides from the machine or the moment, not from the config.
OF_THE_MOMENT = {"OMP_NUM_THREADS", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
                 "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"}


def environment(config):
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    prepare.is_port_in_use = lambda port=None: False
    # the libraries for fp8 need a GPU to be installed; the launcher only asks whether they are there
    prepare.is_fp8_available = lambda: True
    parser = launch.launch_command_parser()
    args = parser.parse_args(["--config_file", str(config), "train.py"])
    args, _, _ = launch._validate_launch_command(args)
    # as accelerate.commands.launch.launch_command dispatches
    if args.use_deepspeed and not args.cpu:
        args.deepspeed_fields_from_accelerate_config = ",".join(fields(args, config))
        _, env = prepare.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.use_megatron_lm or (args.multi_gpu and not args.cpu):
        env = prepare.prepare_multi_gpu_env(args)
    else:
        _, env = prepare.prepare_simple_launcher_cmd_env(args)
    return {k: v for k, v in sorted(env.items()) if os.environ.get(k) != v and k not in OF_THE_MOMENT}


def fields(args, config):
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

    for config in sorted(FOLDER.glob("*.yaml")):
        if config.name.endswith(".job.yaml"):
            continue
        env = {"_accelerate": accelerate.__version__, **environment(config)}
        config.with_suffix(".env.json").write_text(json.dumps(env, indent=1) + "\n")
        print(config.name, len(env), file=sys.stderr)
