//! [`format_resume_command`]: the command line that resumes a run that has failed or was stopped.
use crate::format::quote_shell_words;
use jobspec::ResumeFrom;

/// The option that overrides a key of the job.
const SET_OPTION: &str = "--set";
/// The key of the job that selects the checkpoint from which a run resumes.
const RESUME_FROM_KEY: &str = "resume.from";

/// Returns the command line, quoted for a shell, that resumes a run of the built-in training.
/// Returns `None` if there is nothing to resume, because the run began without a checkpoint and has
/// saved none.
///
/// `words` is the command line of the run, and `from` its `resume.from`. `has_saved` states whether
/// the run has saved a checkpoint. A run that began with another value than `auto` would begin
/// there again, so that `auto` then replaces the value.
pub(super) fn format_resume_command(words: &[String], from: &ResumeFrom, has_saved: bool) -> Option<String> {
    match (from, has_saved) {
        (ResumeFrom::Never, false) => None,
        (ResumeFrom::Auto, _) | (ResumeFrom::Path(_), false) => Some(quote_shell_words(words)),
        (ResumeFrom::Never | ResumeFrom::Path(_), true) => {
            // A later override precedes an earlier one of the whole section `resume`.
            let mut words = remove_resume_from_overrides(words);
            words.extend([SET_OPTION.to_owned(), format!("{RESUME_FROM_KEY}=auto")]);
            Some(quote_shell_words(&words))
        }
    }
}

/// Returns a command line without its options that override `resume.from`, such as
/// `--set resume.from=never`.
fn remove_resume_from_overrides(words: &[String]) -> Vec<String> {
    let mut kept = Vec::with_capacity(words.len());
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let value = match word.strip_prefix(SET_OPTION) {
            Some("") => words.next(),
            Some(rest) if rest.strip_prefix('=').is_some_and(overrides_resume_from) => continue,
            _ => None,
        };
        if !value.is_some_and(|value| overrides_resume_from(value)) {
            kept.push(word.clone());
            kept.extend(value.cloned());
        }
    }
    kept
}

/// Returns whether `text`, an override of the form `path=value`, sets `resume.from`.
fn overrides_resume_from(text: &str) -> bool {
    let path = text.split('=').next().unwrap_or_default();
    // Spaces around the names of a path have no effect.
    path.split('.').map(str::trim).eq(RESUME_FROM_KEY.split('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats the command that resumes the run of `command`, whose words are separated by spaces.
    fn format_for(command: &str, from: &ResumeFrom, has_saved: bool) -> Option<String> {
        let words: Vec<String> = command.split(' ').map(str::to_owned).collect();
        format_resume_command(&words, from, has_saved)
    }

    #[test]
    fn a_run_that_began_elsewhere_resumes_from_its_newest_checkpoint() {
        let path = ResumeFrom::Path("old".into());
        for (command, from, expected) in [
            ("launch a.yaml", ResumeFrom::Never, "launch a.yaml --set resume.from=auto"),
            (
                "launch a.yaml --set resume.from=never",
                ResumeFrom::Never,
                "launch a.yaml --set resume.from=auto",
            ),
            (
                "launch --set=resume.from=old a.yaml --set b=1 --set=c=2",
                path.clone(),
                "launch a.yaml --set b=1 --set=c=2 --set resume.from=auto",
            ),
            (
                "launch a.yaml --set resume.rng=strict --set resume.from=auto --set resume.from=old",
                path.clone(),
                "launch a.yaml --set resume.rng=strict --set resume.from=auto",
            ),
            (
                "launch a.yaml --set resume={from:never}",
                ResumeFrom::Never,
                "launch a.yaml --set 'resume={from:never}' --set resume.from=auto",
            ),
        ] {
            assert_eq!(format_for(command, &from, true).as_deref(), Some(expected));
        }
    }

    #[test]
    fn without_a_saved_checkpoint_the_same_command_resumes_where_the_run_began() {
        let command = "launch a.yaml --set resume.from=old";
        let path = ResumeFrom::Path("old".into());
        assert_eq!(format_for(command, &path, false).as_deref(), Some(command));
        for has_saved in [false, true] {
            let automatic = format_for("launch a.yaml --json", &ResumeFrom::Auto, has_saved);
            assert_eq!(automatic.as_deref(), Some("launch a.yaml --json"));
        }
        assert_eq!(format_for("launch a.yaml", &ResumeFrom::Never, false), None);
    }
}
