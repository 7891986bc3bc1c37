//! The name and the options of the program `deepspeed` ([`DEEPSPEED_OPTIONS`]).
use crate::import::command_line::OptionTable;

/// The name of the command `deepspeed` in messages about a converted command line.
pub(super) const PROGRAM_NAME: &str = "deepspeed";
/// The options that the program `deepspeed` accepts, including those of elastic training in earlier
/// releases.
pub(super) const DEEPSPEED_OPTIONS: OptionTable = OptionTable {
    program: "deepspeed",
    values: &[
        "hostfile",
        "include",
        "exclude",
        "num_nodes",
        "num_gpus",
        "num_accelerators",
        "min_elastic_nodes",
        "max_elastic_nodes",
        "master_port",
        "master_addr",
        "node_rank",
        "launcher",
        "launcher_args",
        "enable_each_rank_log",
        "autotuning",
        "bind_core_list",
        "ssh_port",
        "venv_script",
        "log_level",
    ],
    flags: &[
        "elastic_training",
        "module",
        "no_python",
        "no_local_rank",
        "no_ssh",
        "no_ssh_check",
        "force_multi",
        "save_pid",
        "bind_cores_to_rank",
        "quiet",
    ],
    short: &[("-H", "hostfile"), ("-i", "include"), ("-e", "exclude"), ("-q", "quiet")],
    separator: '_',
    any_separator: false,
    prefixes: true,
    choices: &[
        ("autotuning", &["tune", "run"]),
        ("log_level", &["debug", "info", "warning", "error", "critical"]),
    ],
    integers: &[
        "num_nodes",
        "num_gpus",
        "num_accelerators",
        "min_elastic_nodes",
        "max_elastic_nodes",
        "master_port",
        "node_rank",
        "ssh_port",
    ],
    numbers: &[],
};
