//! [`Filter`]: the log filter of a process, which decides by target and level which `tracing`
//! events are written to the debug log.
use std::{error::Error, fmt};
use tracing_subscriber::EnvFilter;

/// The log filter that a process uses if the user chooses none: `info`, which logs the levels
/// `info`, `warn` and `error`.
pub const DEFAULT_FILTER: &str = "info";

/// A valid log filter, which selects events by target and level, such as `agent=debug,info`. The
/// syntax is that of `tracing_subscriber::EnvFilter`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    directives: String,
}

/// The error for a text that cannot be parsed as log filter directives such as `agent=debug,info`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidFilter {
    /// The parser's message, which states why the directives are not valid.
    pub reason: String,
}

impl fmt::Display for InvalidFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected levels by target, such as `agent=debug,info`: {}", self.reason)
    }
}

impl Error for InvalidFilter {}

impl Default for Filter {
    fn default() -> Filter {
        Filter { directives: DEFAULT_FILTER.to_owned() }
    }
}

impl Filter {
    /// Parses the directives of a log filter, such as `debug`, `agent=debug,info` or `off`.
    ///
    /// # Errors
    /// Fails if a directive has no valid level or target.
    pub fn parse(directives: &str) -> Result<Filter, InvalidFilter> {
        match EnvFilter::builder().with_regex(false).parse(directives) {
            Ok(_) => Ok(Filter { directives: directives.to_owned() }),
            Err(error) => Err(InvalidFilter { reason: error.to_string() }),
        }
    }

    /// Returns the log filter of a process: the parsed `directives`, or, if they are absent or
    /// blank, the filter for the number of `-v` options.
    ///
    /// # Errors
    /// Fails if the directives are invalid.
    pub fn from_directives_or_verbosity(
        directives: Option<&str>,
        verbosity: u8,
    ) -> Result<Filter, InvalidFilter> {
        match (directives.filter(|text| !text.trim().is_empty()), verbosity) {
            (Some(directives), _) => Filter::parse(directives),
            (None, 0 | 1) => Ok(Filter::default()),
            (None, 2) => Filter::parse("debug"),
            (None, _) => Filter::parse("trace"),
        }
    }

    /// Returns the directives that the filter was parsed from, such as `agent=debug,info`.
    pub fn directives(&self) -> &str {
        &self.directives
    }

    /// Returns whether the filter is `off`, so that no event is logged.
    pub(crate) fn is_off(&self) -> bool {
        self.directives.trim().eq_ignore_ascii_case("off")
    }

    /// Converts the filter to the [`EnvFilter`] that a subscriber of `tracing` uses.
    pub(crate) fn to_env_filter(&self) -> EnvFilter {
        EnvFilter::builder().with_regex(false).parse_lossy(&self.directives)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_take_precedence_over_the_verbosity() {
        let select = |directives, verbosity| {
            Filter::from_directives_or_verbosity(directives, verbosity).map(|f| f.directives)
        };
        assert_eq!(select(None, 0), Ok("info".into()));
        assert_eq!(select(Some(""), 2), Ok("debug".into()));
        assert_eq!(select(Some("agent=debug,info"), 3), Ok("agent=debug,info".into()));
        assert_eq!(select(None, 9), Ok("trace".into()));
        for wrong in ["agent=loud", "=debug=", "a=b=c"] {
            assert!(select(Some(wrong), 0).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_off_is_off() {
        assert!(Filter::parse("OFF").expect("valid").is_off());
        assert!(!Filter::parse("agent=off,info").expect("valid").is_off());
    }
}
