//! [`CommandLine`]: the options and the program of a command line of another launcher (torchrun,
//! accelerate or deepspeed), parsed by the rules of Python's argparse.
//!
//! The options precede the script. All arguments after the script belong to the script.
use diagnostic::{Diagnostic, Location, codes::command};

/// The options that another launcher, such as torchrun, accepts on its command line, grouped by the
/// kind of value that they take. Their names are long names without leading dashes.
#[derive(Debug)]
pub(super) struct OptionTable {
    /// The name of the launcher in messages.
    pub(super) program: &'static str,
    /// The options that have a value.
    pub(super) values: &'static [&'static str],
    /// The options that have no value.
    pub(super) flags: &'static [&'static str],
    /// The short options, with the long names.
    pub(super) short: &'static [(&'static str, &'static str)],
    /// The separator of words that the names in this table contain: `-` or `_`.
    pub(super) separator: char,
    /// Whether the launcher accepts `-` and `_` as separators.
    pub(super) any_separator: bool,
    /// Whether the launcher accepts unambiguous prefixes of options.
    pub(super) prefixes: bool,
    /// The options whose values are restricted to a list.
    pub(super) choices: &'static [(&'static str, &'static [&'static str])],
    /// The options whose values are integers.
    pub(super) integers: &'static [&'static str],
    /// The options whose values are numbers.
    pub(super) numbers: &'static [&'static str],
}

/// The parsed command line of another launcher (torchrun, accelerate or deepspeed): its options,
/// and the program with its arguments. A conversion removes each option that it handles.
#[derive(Debug)]
pub(super) struct CommandLine {
    options: Vec<(&'static str, String)>,
    /// The script, module or program, followed by its arguments.
    pub(super) program: Vec<String>,
}

impl CommandLine {
    /// Removes every occurrence of the option `name` from the parsed command line, and returns the
    /// last value, or `None` if the option was not given.
    pub(super) fn take_last_value(&mut self, name: &str) -> Option<String> {
        let value = self.last_value(name).map(str::to_owned);
        self.options.retain(|(n, _)| *n != name);
        value
    }

    /// Returns the last value of the option `name`, without removing the option from the parsed
    /// command line. Returns `None` if the option was not given.
    pub(super) fn last_value(&self, name: &str) -> Option<&str> {
        self.options.iter().rev().find(|(n, _)| *n == name).map(|(_, value)| value.as_str())
    }

    /// Removes a flag, an option without a value, from the parsed command line, and returns whether
    /// the flag was given.
    pub(super) fn take_flag(&mut self, name: &str) -> bool {
        self.take_last_value(name).is_some()
    }

    /// Inserts the option `name` with a default value before all given options, so that a value on
    /// the command line takes precedence.
    pub(super) fn insert_default(&mut self, name: &'static str, value: String) {
        self.options.insert(0, (name, value));
    }

    /// Removes and returns the options that are still in the parsed command line, because no
    /// conversion has used them. Returns the name and the last value of each option, in the order
    /// of the command line.
    pub(super) fn take_remaining_options(&mut self) -> Vec<(&'static str, String)> {
        let mut names: Vec<&'static str> = Vec::new();
        for (name, _) in &self.options {
            if !names.contains(name) {
                names.push(name);
            }
        }
        names.into_iter().filter_map(|name| Some((name, self.take_last_value(name)?))).collect()
    }
}

/// The reason why the command line of another launcher is invalid, such as an unknown option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CommandLineError {
    /// The launcher does not have the option. The variant contains the launcher and the argument.
    #[error("{0} has no option `{1}`")]
    UnknownOption(&'static str, String),
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
    InvalidValue { option: &'static str, value: String, expected: String },
    /// No script follows the options.
    #[error("no script follows the options of {0}")]
    MissingScript(&'static str),
    /// The name of the script is empty.
    #[error("the name of the script is empty")]
    EmptyScript,
}

impl CommandLineError {
    /// Converts the error to a diagnostic for the user about the command line of `program`.
    pub(super) fn into_diagnostic(self, program: &'static str) -> Diagnostic {
        let diagnostic = Diagnostic::error(command::IMPORT_ARGUMENTS_INVALID, self.to_string())
            .with_location(Location::File { file: program.to_owned() });
        match self {
            CommandLineError::InvalidValue { option, value, .. } => {
                diagnostic.with_field("option", option).with_field("value", value)
            }
            CommandLineError::UnexpectedValue(option) | CommandLineError::MissingValue(option) => {
                diagnostic.with_field("option", option)
            }
            _ => diagnostic,
        }
    }
}

impl OptionTable {
    /// Parses the command line of another launcher into its options, which this table lists, and
    /// the program with its arguments. Fails if argparse would reject them.
    pub(super) fn parse(&self, args: &[String]) -> Result<CommandLine, CommandLineError> {
        let mut given = CommandLine { options: Vec::new(), program: Vec::new() };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            if arg == "--" || !arg.starts_with('-') || arg == "-" {
                if arg != "--" {
                    given.program.push(arg.clone());
                    // argparse removes the first `--`, also if it follows the script.
                    args = if args.as_slice().first().is_some_and(|next| next == "--") {
                        args.as_slice()[1..].iter()
                    } else {
                        args
                    };
                }
                given.program.extend(args.cloned());
                break;
            }
            let (name, attached) = self.parse_option(arg)?;
            let value = match (self.flags.contains(&name), attached) {
                (true, Some(_)) => return Err(CommandLineError::UnexpectedValue(name)),
                (true, None) => String::new(),
                (false, Some(value)) => value,
                (false, None) => args.next().cloned().ok_or(CommandLineError::MissingValue(name))?,
            };
            self.check_value(name, &value)?;
            given.options.push((name, value));
        }
        match given.program.first() {
            None => Err(CommandLineError::MissingScript(self.program)),
            Some(script) if script.is_empty() => Err(CommandLineError::EmptyScript),
            Some(_) => Ok(given),
        }
    }

    /// Returns the full name and the value, if any, of an option of another launcher that is
    /// written as `--name`, `--name=value` or `-m`.
    fn parse_option(&self, arg: &str) -> Result<(&'static str, Option<String>), CommandLineError> {
        let unknown = || CommandLineError::UnknownOption(self.program, arg.escape_debug().to_string());
        let Some(long) = arg.strip_prefix("--") else {
            let found = self.short.iter().find(|(short, _)| arg.starts_with(short));
            let (short, name) = found.ok_or_else(unknown)?;
            let rest = &arg[short.len()..];
            return Ok((name, (!rest.is_empty()).then(|| rest.trim_start_matches('=').to_owned())));
        };
        let (written, value) =
            long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value.to_owned())));
        let separators: &[char] = if self.any_separator { &['-', '_'] } else { &[] };
        let written = written.replace(separators, &self.separator.to_string());
        let names = || self.values.iter().chain(self.flags);
        if let Some(name) = names().find(|name| **name == written) {
            return Ok((name, value));
        }
        let mut near =
            names().filter(|name| self.prefixes && name.starts_with(&written) && !written.is_empty());
        match (near.next(), near.next()) {
            (Some(name), None) => Ok((name, value)),
            (Some(first), Some(second)) => {
                Err(CommandLineError::Ambiguous { option: arg.escape_debug().to_string(), first, second })
            }
            (None, _) => Err(unknown()),
        }
    }

    /// Fails if the other launcher would reject `value` as the value of its option `name`, for
    /// example text instead of an integer.
    pub(super) fn check_value(&self, name: &'static str, value: &str) -> Result<(), CommandLineError> {
        let invalid = |expected: String| {
            let value = value.escape_debug().to_string();
            Err(CommandLineError::InvalidValue { option: name, value, expected })
        };
        if let Some((_, choices)) = self.choices.iter().find(|(option, _)| *option == name)
            && !choices.contains(&value)
        {
            return invalid(format!("one of {}", choices.join(", ")));
        }
        if self.integers.contains(&name) && value.trim().parse::<i64>().is_err() {
            return invalid("an integer".to_owned());
        }
        if self.numbers.contains(&name) && !value.trim().parse::<f64>().is_ok_and(f64::is_finite) {
            return invalid("a number".to_owned());
        }
        Ok(())
    }
}

/// Returns whether a command line of another launcher requests help: `-h` or `--help` precedes the
/// script.
pub(crate) fn requests_help(args: &[String]) -> bool {
    let options = args.iter().take_while(|arg| arg.starts_with('-') && *arg != "--");
    options.into_iter().any(|arg| arg == "-h" || arg == "--help")
}
