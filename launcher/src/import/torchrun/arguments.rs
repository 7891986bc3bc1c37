//! [`parse_torchrun_args`]: parses torchrun's command line by the rules of torchrun.
//!
//! The parser accepts `--a-b x`, `--a_b=x`, unambiguous prefixes of options, and `-m`. All
//! arguments after the script belong to the script.
use diagnostic::{Diagnostic, Location, codes::command};

/// The long names of torchrun's options that have a value.
const VALUES: &[&str] = &[
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
];
/// The long names of torchrun's options that have no value.
const FLAGS: &[&str] = &["standalone", "module", "no-python", "run-path", "virtual-local-rank"];
/// The short options of torchrun, with their long names.
const SHORT: &[(&str, &str)] = &[("-m", "module"), ("-r", "redirects"), ("-t", "tee")];

/// The options and the program of a command line of torchrun.
#[derive(Debug)]
pub(super) struct TorchrunArgs {
    options: Vec<(&'static str, String)>,
    /// The script, module or program, followed by its arguments.
    pub(super) program: Vec<String>,
}

impl TorchrunArgs {
    /// Removes every occurrence of the option `name`. Returns its last value, or `None` if the
    /// option was not given.
    pub(super) fn take_last_value(&mut self, name: &str) -> Option<String> {
        let value = self.options.iter().rev().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
        self.options.retain(|(n, _)| *n != name);
        value
    }

    /// Returns the last value of the option `name`, and keeps the option. Returns `None` if the
    /// option was not given.
    pub(super) fn last_value(&self, name: &str) -> Option<&str> {
        self.options.iter().rev().find(|(n, _)| *n == name).map(|(_, value)| value.as_str())
    }

    /// Removes the option `name`, which has no value. Returns whether the option was given.
    pub(super) fn take_flag(&mut self, name: &str) -> bool {
        self.take_last_value(name).is_some()
    }
}

/// A mistake in a command line of torchrun.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TorchrunArgsError {
    /// torchrun does not have the option. The variant contains the argument.
    #[error("torchrun has no option `{0}`")]
    UnknownOption(String),
    /// Several options begin with the text that was given.
    #[error("`{option}` is ambiguous: `--{first}` or `--{second}`")]
    Ambiguous { option: String, first: &'static str, second: &'static str },
    /// A value was given for an option that has none.
    #[error("`--{0}` takes no value")]
    UnexpectedValue(&'static str),
    /// The command line ends after an option that requires a value.
    #[error("`--{0}` requires a value")]
    MissingValue(&'static str),
    /// The value of an option does not have the expected form.
    #[error("`--{option}` is `{value}`; expected {expected}")]
    InvalidValue { option: &'static str, value: String, expected: &'static str },
    /// No script follows the options.
    #[error("no script follows the options of torchrun")]
    MissingScript,
    /// The name of the script is empty.
    #[error("the name of the script is empty")]
    EmptyScript,
}

impl From<TorchrunArgsError> for Diagnostic {
    fn from(error: TorchrunArgsError) -> Diagnostic {
        let diagnostic = Diagnostic::error(command::IMPORT_ARGUMENTS_INVALID, error.to_string())
            .with_location(Location::File { file: "torchrun".to_owned() })
            .with_help("write the arguments that follow `torchrun`: -- --nproc-per-node 2 train.py");
        match error {
            TorchrunArgsError::InvalidValue { option, value, .. } => {
                diagnostic.with_field("option", option).with_field("value", value)
            }
            TorchrunArgsError::UnexpectedValue(option) | TorchrunArgsError::MissingValue(option) => {
                diagnostic.with_field("option", option)
            }
            _ => diagnostic,
        }
    }
}

/// Parses the arguments of torchrun. The name `torchrun` may precede them, because users copy it
/// along.
pub(super) fn parse_torchrun_args(args: &[String]) -> Result<TorchrunArgs, TorchrunArgsError> {
    let mut given = TorchrunArgs { options: Vec::new(), program: Vec::new() };
    let mut args = args.iter().peekable();
    // The command line may have been copied with the program's name.
    args.next_if(|first| first.rsplit('/').next() == Some("torchrun"));
    while let Some(arg) = args.next() {
        if arg == "--" || !arg.starts_with('-') || arg == "-" {
            given.program.extend((arg != "--").then(|| arg.clone()));
            given.program.extend(args.cloned());
            break;
        }
        let (name, attached) = parse_option(arg)?;
        let value = match (FLAGS.contains(&name), attached) {
            (true, Some(_)) => return Err(TorchrunArgsError::UnexpectedValue(name)),
            (true, None) => String::new(),
            (false, Some(value)) => value,
            (false, None) => args.next().cloned().ok_or(TorchrunArgsError::MissingValue(name))?,
        };
        given.options.push((name, value));
    }
    match given.program.first() {
        None => Err(TorchrunArgsError::MissingScript),
        Some(script) if script.is_empty() => Err(TorchrunArgsError::EmptyScript),
        Some(_) => Ok(given),
    }
}

/// Parses an argument such as `--name`, `--name=value` or `-m`. Returns the full name of the
/// option, and the value if the argument contains one.
fn parse_option(arg: &str) -> Result<(&'static str, Option<String>), TorchrunArgsError> {
    let unknown = || TorchrunArgsError::UnknownOption(arg.escape_debug().to_string());
    let Some(long) = arg.strip_prefix("--") else {
        let found = SHORT.iter().find(|(short, _)| arg.starts_with(short));
        let (short, name) = found.ok_or_else(unknown)?;
        let rest = &arg[short.len()..];
        return Ok((name, (!rest.is_empty()).then(|| rest.trim_start_matches('=').to_owned())));
    };
    let (written, value) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v.to_owned())));
    let written = written.replace('_', "-");
    let names = || VALUES.iter().chain(FLAGS);
    if let Some(name) = names().find(|name| **name == written) {
        return Ok((name, value));
    }
    let mut near = names().filter(|name| name.starts_with(&written) && !written.is_empty());
    match (near.next(), near.next()) {
        (Some(name), None) => Ok((name, value)),
        (Some(first), Some(second)) => {
            Err(TorchrunArgsError::Ambiguous { option: arg.escape_debug().to_string(), first, second })
        }
        (None, _) => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(text: &str) -> Result<TorchrunArgs, TorchrunArgsError> {
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
        use TorchrunArgsError::*;
        let unknown = |option: &str| UnknownOption(option.to_owned());
        for (text, expected) in [
            ("", MissingScript),
            ("--nnodes", MissingValue("nnodes")),
            ("--nnodes 2", MissingScript),
            ("--frobnicate a.py", unknown("--frobnicate")),
            ("--n a.py", Ambiguous { option: "--n".into(), first: "nnodes", second: "nproc-per-node" }),
            ("--standalone=1 a.py", UnexpectedValue("standalone")),
            ("-x a.py", unknown("-x")),
        ] {
            assert_eq!(parse_line(text).expect_err(text), expected);
        }
    }
}
