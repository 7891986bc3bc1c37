//! [`OptionValueError`] and the parsers of option values that several commands use.

/// The error that the value of a command-line option is malformed, such as a size without a unit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OptionValueError {
    /// The value is not a rank or a range of ranks.
    #[error("expected a rank or a range of ranks, such as 3 or 0-3,7")]
    Ranks,
    /// The value is not a duration with a unit.
    #[error("expected a duration, such as 30s, 10m or 2h")]
    Duration,
    /// The value is not a size, such as `5GB`.
    #[error("expected a size, such as 5GB, 500MB or 2GiB")]
    Size,
    /// The value is less memory than the conversion of a checkpoint needs.
    #[error("expected 64MiB or more")]
    MemoryTooSmall,
    /// The value is not a rule `PATTERN=N` that assigns parameters to an optimizer group.
    #[error("expected a pattern of names and the number of a group, such as '*norm*=1'")]
    GroupRule,
    /// The pattern of a rule is not a valid glob pattern.
    #[error("the pattern is not valid: {0}")]
    Pattern(globset::ErrorKind),
}

/// Parses a size such as `5GB` or `1.5GiB`, in the notation of job.yaml. Returns the size in bytes.
/// Fails if the size is less than 1 byte.
pub(crate) fn parse_size(text: &str) -> Result<u64, OptionValueError> {
    jobspec::parse_size(text).filter(|bytes| *bytes > 0).ok_or(OptionValueError::Size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_units_are_parsed() {
        assert_eq!(parse_size("5GB"), Ok(5_000_000_000));
        assert_eq!(parse_size("1.5 MiB"), Ok(1_572_864));
        assert_eq!(parse_size("4096B"), Ok(4096));
        for wrong in ["", "GB", "0B", "4096", "5gb", "5XB", "-1GB", "1e9", "nan", "99999999TB"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
