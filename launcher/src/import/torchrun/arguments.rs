//! [`TORCHRUN_OPTIONS`]: the options of torchrun.
//!
//! torchrun accepts `--a-b x`, `--a_b=x`, unambiguous prefixes of options, and `-m`.
use crate::import::command_line::{CommandLine, CommandLineError, OptionTable};

/// The name of the command `torchrun` in messages about a converted command line.
pub(super) const PROGRAM_NAME: &str = "torchrun";
/// The options of torchrun, with the kind of value that each of them takes.
pub(super) const TORCHRUN_OPTIONS: OptionTable = OptionTable {
    program: "torchrun",
    values: &[
        "nnodes",
        "nproc-per-node",
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "rdzv-conf",
        "max-restarts",
        "monitor-interval",
        "start-method",
        "event-log-handler",
        "role",
        "log-dir",
        "redirects",
        "tee",
        "log-line-prefix-template",
        "local-ranks-filter",
        "duplicate-stdout-filters",
        "duplicate-stderr-filters",
        "node-rank",
        "master-addr",
        "master-port",
        "local-addr",
        "logs-specs",
        "numa-binding",
        "signals-to-handle",
        "shutdown-timeout",
    ],
    flags: &["standalone", "module", "no-python", "run-path", "virtual-local-rank"],
    short: &[("-m", "module"), ("-r", "redirects"), ("-t", "tee")],
    separator: '-',
    any_separator: true,
    prefixes: true,
    choices: &[
        ("start-method", &["spawn", "fork", "forkserver"]),
        ("numa-binding", &["node", "socket", "exclusive", "core-complex"]),
    ],
    integers: &[],
    numbers: &[],
};

/// The options of `python -m torch.distributed.launch`, the predecessor of torchrun.
const LEGACY_OPTIONS: OptionTable = OptionTable {
    program: "torch.distributed.launch",
    flags: &["standalone", "module", "no-python", "run-path", "virtual-local-rank", "use-env"],
    ..TORCHRUN_OPTIONS
};

/// A program of torch whose command lines launch can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TorchProgram {
    /// torchrun, which is the module `torch.distributed.run`.
    Torchrun,
    /// The module `torch.distributed.launch`, which gives scripts the argument `--local-rank`.
    LegacyLaunch,
}

impl TorchProgram {
    /// Parses the arguments of the program into options and the script.
    pub(super) fn parse(self, args: &[String]) -> Result<CommandLine, CommandLineError> {
        match self {
            TorchProgram::Torchrun => parse_torchrun_args(args),
            TorchProgram::LegacyLaunch => LEGACY_OPTIONS.parse(args),
        }
    }
}

/// The options of torchrun for which torchrun reads no default value from an environment variable.
const OPTIONS_WITHOUT_VARIABLE: [&str; 2] = ["logs-specs", "numa-binding"];

/// Parses the arguments of torchrun into options and the program. The name `torchrun` may precede
/// them, because users copy it along.
pub(super) fn parse_torchrun_args(args: &[String]) -> Result<CommandLine, CommandLineError> {
    let named = args.first().is_some_and(|first| first.rsplit('/').next() == Some("torchrun"));
    TORCHRUN_OPTIONS.parse(if named { &args[1..] } else { args })
}

/// Adds the defaults of options that torchrun reads from environment variables such as
/// `PET_NPROC_PER_NODE`. The function `variable` returns the value of a variable.
pub(super) fn insert_defaults_from_env<'a>(
    given: &mut CommandLine,
    variable: impl Fn(&str) -> Option<&'a str>,
) -> Result<(), CommandLineError> {
    let named = |name: &str| variable(&format!("PET_{}", name.replace('-', "_").to_uppercase()));
    for name in TORCHRUN_OPTIONS.values.iter().filter(|name| !OPTIONS_WITHOUT_VARIABLE.contains(name)) {
        if let Some(value) = named(name) {
            TORCHRUN_OPTIONS.check_value(name, value)?;
            given.insert_default(name, value.to_owned());
        }
    }
    for name in TORCHRUN_OPTIONS.flags {
        let Some(value) = named(name) else { continue };
        match value.trim().parse::<i64>() {
            Ok(0) => {}
            Ok(_) => given.insert_default(name, String::new()),
            Err(_) => {
                let (value, expected) = (value.escape_debug().to_string(), "0 or 1".to_owned());
                return Err(CommandLineError::InvalidValue { option: name, value, expected });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(text: &str) -> Result<CommandLine, CommandLineError> {
        parse_torchrun_args(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_follow_the_rules_of_torchruns_parser() {
        let mut given = parse_line(
            "torchrun --nproc_per_node=2 --nnodes 1:4 --stand -m -t3 --max-r 5 pkg.train --nnodes 9 -- x",
        )
        .expect("read");
        assert_eq!(given.program, ["pkg.train", "--nnodes", "9", "--", "x"]);
        assert_eq!(given.take_last_value("nnodes").as_deref(), Some("1:4"));
        assert_eq!(given.take_last_value("nnodes"), None);
        assert_eq!(given.take_last_value("nproc-per-node").as_deref(), Some("2"));
        assert_eq!(given.take_last_value("tee").as_deref(), Some("3"));
        assert_eq!(given.take_last_value("max-restarts").as_deref(), Some("5"));
        assert!(given.take_flag("standalone") && given.take_flag("module") && !given.take_flag("run-path"));
    }

    #[test]
    fn mistakes_are_identified() {
        use CommandLineError::*;
        let unknown = |option: &str| UnknownOption("torchrun", option.to_owned());
        for (text, expected) in [
            ("", MissingScript("torchrun")),
            ("--nnodes", MissingValue("nnodes")),
            ("--nnodes 2", MissingScript("torchrun")),
            ("--frobnicate a.py", unknown("--frobnicate")),
            ("--n a.py", Ambiguous { option: "--n".into(), first: "nnodes", second: "nproc-per-node" }),
            ("--standalone=1 a.py", UnexpectedValue("standalone")),
            ("-x a.py", unknown("-x")),
        ] {
            assert_eq!(parse_line(text).expect_err(text), expected);
        }
    }

    #[test]
    fn variables_are_defaults_of_options() {
        let variables = [("PET_NPROC_PER_NODE", "4"), ("PET_MODULE", "1"), ("PET_STANDALONE", "0")];
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| *value);
        let mut given = parse_line("--nproc-per-node 2 a.py").expect("read");
        insert_defaults_from_env(&mut given, find).expect("valid");
        assert_eq!(given.last_value("nproc-per-node"), Some("2"));
        assert!(given.take_flag("module") && !given.take_flag("standalone"));
        let mut given = parse_line("a.py").expect("read");
        insert_defaults_from_env(&mut given, find).expect("valid");
        assert_eq!(given.last_value("nproc-per-node"), Some("4"));
        let mistake = insert_defaults_from_env(&mut given, |name| (name == "PET_RUN_PATH").then_some("yes"));
        assert!(matches!(mistake, Err(CommandLineError::InvalidValue { option: "run-path", .. })));
    }
}
