//! [`activate_environments`]: activates the environments of `run.activate` in a login shell, and
//! returns how they change the environment of workers.
use super::{
    environment_changes::EnvironmentChanges,
    process::{ShellError, ShellLimits, ShellOutput, run_login_shell},
};
use diagnostic::{Code, Diagnostic, codes::host as codes, quantity::format_seconds};
use jobspec::{ActivationStep, RunSpec, hide_secret_values};
use protocol::control::ExitStatus;
use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::Path,
    time::Duration,
};

/// The largest number of bytes that the login shell for `run.activate` may print, including the
/// environment variables after the activation.
const MAX_SHELL_OUTPUT_BYTES: usize = 2 << 20;
/// The number of lines, from the end of the output of the activation script (`run.activate`), that
/// an error message shows.
const MAX_ERROR_OUTPUT_LINES: usize = 5;
/// The length, in bytes, to which each line of the activation script's output (`run.activate`) is
/// truncated in an error message.
const MAX_ERROR_LINE_BYTES: usize = 400;
/// The environment variables that a shell sets for itself, and that are not passed on to workers.
const SHELL_VARIABLES: &[&str] = &["_", "SHLVL", "PWD", "OLDPWD"];
/// The prefix of the names of the shell variables that launch's activation script uses internally.
const SCRIPT_VARIABLE_PREFIX: &str = "__launch_";

/// Activates the environments that `run.activate` lists in a login shell on this host, and returns
/// how they change the environment variables of this process. `hidden` are the variables that
/// workers do not inherit. Blocks for up to `run.activate_timeout`.
///
/// Returns no changes for a job without `run.activate`.
pub(crate) fn activate_environments(
    run: &RunSpec,
    host: &str,
    hidden: &[String],
) -> diagnostic::Result<EnvironmentChanges> {
    if run.activate.is_empty() {
        return Ok(EnvironmentChanges::default());
    }
    let failure = ActivationResultParser { steps: &run.activate, host };
    let marker = generate_output_marker().map_err(|error| {
        failure
            .build_error(codes::ACTIVATION_FAILED, "the system provides no random numbers", &[])
            .with_cause(&error)
    })?;
    let script = build_activation_script(&run.activate, &run.workdir, &marker);
    let time = Duration::from_millis(run.activate_timeout_ms);
    let limits = ShellLimits { time, stdout_bytes: MAX_SHELL_OUTPUT_BYTES };
    match run_login_shell(&script, &run.workdir, hidden, limits) {
        Ok(output) => {
            let after = failure.parse_environment(&output, &marker)?;
            let is_hidden = |name: &OsString| hidden.iter().any(|hidden| OsStr::new(hidden) == name);
            let before = std::env::vars_os().filter(|(name, _)| !is_hidden(name));
            Ok(EnvironmentChanges::compare_environments(&remove_shell_variables(before), after))
        }
        Err(ShellError::TimedOut(text)) => {
            let message = format!("the login shell did not end within {}", format_seconds(time));
            Err(failure
                .build_error(codes::ACTIVATION_TIMEOUT, &message, &text)
                .with_field("seconds", time.as_secs_f64()))
        }
        Err(ShellError::TooMuchOutput) => {
            let message = format!("the environment is larger than {} MiB", MAX_SHELL_OUTPUT_BYTES >> 20);
            Err(failure.build_error(codes::ACTIVATION_ENVIRONMENT_INVALID, &message, &[]))
        }
        Err(ShellError::Io(error)) => {
            let directory = run.workdir.display();
            let message = format!("cannot run a login shell in {directory}");
            Err(failure.build_error(codes::ACTIVATION_FAILED, &message, &[]).with_cause(&error))
        }
    }
}

/// Returns a random text that the activation script prints just before its list of environment
/// variables, in order to mark where the list begins.
fn generate_output_marker() -> io::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(format!("launch-activation-{:032x}", u128::from_ne_bytes(bytes)))
}

/// Removes the variables that the shell and launch's activation script use for themselves from the
/// activated environment variables.
fn remove_shell_variables(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> BTreeMap<OsString, OsString> {
    let is_own = |name: &OsString| {
        SHELL_VARIABLES.iter().any(|other| OsStr::new(other) == name)
            || name.as_bytes().starts_with(SCRIPT_VARIABLE_PREFIX.as_bytes())
    };
    variables.filter(|(name, _)| !is_own(name)).collect()
}

/// The shell code with which every activation script (`run.activate`) begins, before the activation
/// of the first environment.
///
/// Descriptor 9 is the pipe that launch reads. What sourced scripts print goes to stderr. After the
/// marker, the shell writes `E` and the reason of a failure, or `S` and the environment.
const SCRIPT_PROLOGUE: &str = r#"exec 9>&1 1>&2
__launch_fail() { printf 'E%s' "$1" >&9; exit 1; }
__launch_check() { [ "$2" = 0 ] || __launch_fail "failed $1 $2"; }
"#;

/// Shell code that makes the command `conda activate` available to the activation script. If
/// `conda` is a program, its hook defines the function. If it is missing, the usual directories are
/// searched.
const CONDA_SETUP_SCRIPT: &str = r#"case "$(command -v conda)" in
conda) ;;
'') for __launch_conda in "${CONDA_EXE-}" "${HOME-}"/miniforge3/bin/conda "${HOME-}"/mambaforge/bin/conda "${HOME-}"/miniconda3/bin/conda "${HOME-}"/anaconda3/bin/conda /opt/conda/bin/conda /opt/miniforge3/bin/conda /opt/miniconda3/bin/conda /opt/anaconda3/bin/conda; do
  if [ -n "$__launch_conda" ] && [ -x "$__launch_conda" ]; then eval "$("$__launch_conda" shell.posix hook)"; break; fi
done ;;
*) eval "$(command conda shell.posix hook)" ;;
esac
command -v conda >/dev/null 2>&1 || __launch_fail 'conda-missing'
"#;

/// Shell code that makes the command `module` (environment modules) available to the activation
/// script if the login shell has not defined it.
const MODULE_SETUP_SCRIPT: &str = r#"if ! command -v module >/dev/null 2>&1; then
  for __launch_file in "${MODULESHOME-}/init/${BASH_VERSION:+ba}sh" /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /usr/share/modules/init/${BASH_VERSION:+ba}sh /usr/share/Modules/init/${BASH_VERSION:+ba}sh /usr/share/lmod/lmod/init/${BASH_VERSION:+ba}sh; do
    if [ -r "$__launch_file" ]; then . "$__launch_file"; fi
    if command -v module >/dev/null 2>&1; then break; fi
  done
fi
command -v module >/dev/null 2>&1 || __launch_fail 'modules-missing'
"#;

/// Builds the shell script that activates the environments `steps` one after another, and then
/// prints the text `marker` and the resulting environment variables. Relative paths begin at
/// `workdir`.
fn build_activation_script(steps: &[ActivationStep], workdir: &Path, marker: &str) -> String {
    let mut script = format!("{SCRIPT_PROLOGUE}printf '{marker}' >&9\n");
    for (i, step) in steps.iter().enumerate() {
        // Sourced scripts get no arguments.
        script.push_str("set --\n");
        match step {
            ActivationStep::Venv(directory) => {
                let file = quote_path(workdir, &directory.join("bin/activate"));
                script.push_str(&format!("[ -r {file} ] || __launch_fail 'venv-missing {i}'\n. {file}\n"));
            }
            ActivationStep::Script(file) => {
                let file = quote_path(workdir, file);
                script.push_str(&format!("[ -r {file} ] || __launch_fail 'script-missing {i}'\n. {file}\n"));
            }
            ActivationStep::Conda(name) => {
                // The name of an environment contains no `/`.
                let name =
                    if name.contains('/') { quote_path(workdir, Path::new(name)) } else { quote_word(name) };
                script.push_str(&format!("{CONDA_SETUP_SCRIPT}conda activate {name}\n"));
            }
            ActivationStep::Modules(names) => {
                let names: Vec<String> = names.iter().map(|name| quote_word(name)).collect();
                script.push_str(&format!("{MODULE_SETUP_SCRIPT}module load {}\n", names.join(" ")));
            }
        }
        script.push_str(&format!("__launch_check {i} \"$?\"\n"));
    }
    script.push_str("printf S >&9\nif [ -x /usr/bin/env ]; then /usr/bin/env -0 >&9; else env -0 >&9; fi\n");
    script
}

/// Quotes a word for a POSIX shell.
fn quote_word(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Converts a path to an absolute one and quotes it for a POSIX shell. `~/` at the beginning stands
/// for the home directory of the host. Other relative paths begin at `workdir`.
fn quote_path(workdir: &Path, path: &Path) -> String {
    match path.strip_prefix("~") {
        Ok(rest) => format!("\"${{HOME-}}\"/{}", quote_word(&rest.to_string_lossy())),
        Err(_) => quote_word(&workdir.join(path).to_string_lossy()),
    }
}

/// Parses the output of the shell script that activates the environments of `run.activate` on a
/// host, and builds the error of a failed activation.
struct ActivationResultParser<'a> {
    steps: &'a [ActivationStep],
    host: &'a str,
}

impl ActivationResultParser<'_> {
    /// Parses the environment variables that the activation script (`run.activate`) has printed
    /// after activating all environments. Fails if the shell reported a failure, or ended without
    /// the environment.
    fn parse_environment(
        &self,
        output: &ShellOutput,
        marker: &str,
    ) -> diagnostic::Result<BTreeMap<OsString, OsString>> {
        let position = output.stdout.windows(marker.len()).position(|part| part == marker.as_bytes());
        let captured = position.map(|position| &output.stdout[position + marker.len()..]);
        // What the login profile prints explains only a failure of the profile.
        let profile: &[u8] = if position.is_some() { &[] } else { &output.stdout };
        let printed = [profile, &output.stderr].concat();
        match (captured, captured.and_then(|captured| captured.split_first()), output.status) {
            (_, Some((b'E', reason)), _) => {
                Err(self.build_reported_error(&String::from_utf8_lossy(reason), &printed))
            }
            (_, Some((b'S', environment)), ExitStatus::Code(0)) => {
                let variables = parse_variables(environment).ok_or_else(|| {
                    let message = "the login shell wrote no valid environment";
                    self.build_error(codes::ACTIVATION_ENVIRONMENT_INVALID, message, &printed)
                })?;
                Ok(remove_shell_variables(variables.into_iter()))
            }
            (None, _, status) => {
                let message = format!("the login profile {}", describe_shell_exit(status));
                Err(self.build_error(codes::ACTIVATION_FAILED, &message, &printed))
            }
            (_, _, status) => {
                let message = format!(
                    "the login shell {} before the environment was read",
                    describe_shell_exit(status)
                );
                let error = self.build_error(codes::ACTIVATION_FAILED, &message, &printed);
                Err(add_exit_status(error, status))
            }
        }
    }

    /// Builds the error for a failure that the activation script itself has detected and reported
    /// with the text `reason`.
    fn build_reported_error(&self, reason: &str, printed: &[u8]) -> Diagnostic {
        let mut words = reason.split(' ');
        let kind = words.next().unwrap_or_default();
        let step = words.next().and_then(|index| self.steps.get(index.parse::<usize>().ok()?));
        match (kind, step) {
            ("conda-missing", _) => {
                let message = "the login shell has no command `conda`";
                self.build_error(codes::ACTIVATION_CONDA_MISSING, message, printed)
            }
            ("modules-missing", _) => {
                let message = "the login shell has no command `module`";
                self.build_error(codes::ACTIVATION_MODULES_MISSING, message, printed)
            }
            ("venv-missing", Some(ActivationStep::Venv(directory))) => {
                let file = directory.join("bin/activate");
                let message = format!("there is no readable file {}", file.display());
                self.build_error(codes::ACTIVATION_VENV_MISSING, &message, &[])
            }
            ("script-missing", Some(ActivationStep::Script(file))) => {
                let message = format!("there is no readable file {}", file.display());
                self.build_error(codes::ACTIVATION_SCRIPT_MISSING, &message, &[])
            }
            ("failed", Some(step)) => {
                let code: u64 = words.next().and_then(|code| code.parse().ok()).unwrap_or(1);
                let message = format!("{} ended with exit code {code}", step.to_yaml());
                self.build_error(codes::ACTIVATION_FAILED, &message, printed).with_field("exit_code", code)
            }
            _ => {
                let message = "the login shell reported no valid reason";
                self.build_error(codes::ACTIVATION_ENVIRONMENT_INVALID, message, printed)
            }
        }
    }

    /// Builds an error of environment activation (`run.activate`) that contains the last lines of
    /// `printed`, the output of the activation script.
    fn build_error(&self, code: Code, message: &str, printed: &[u8]) -> Diagnostic {
        let message = format!("cannot activate the environment of the workers on {}: {message}", self.host);
        let error = Diagnostic::error(code, message)
            .with_subject("run.activate")
            .with_field("host", self.host)
            .with_remedy();
        match take_last_lines(printed) {
            lines if lines.is_empty() => error,
            lines => {
                let error = error.with_field("output", lines.join("\n"));
                lines.iter().fold(error, |error, line| error.with_cause(&io::Error::other(line.clone())))
            }
        }
    }
}

/// Adds the exit code or signal of the shell that ran the activation script to an error.
fn add_exit_status(error: Diagnostic, status: ExitStatus) -> Diagnostic {
    match status {
        ExitStatus::Code(code) => error.with_field("exit_code", u64::from(code)),
        ExitStatus::Signal(signal, _) => error.with_field("signal", signal),
    }
}

/// Describes how the shell that ran the activation script ended, as the end of a sentence, such as
/// `exited with code 1`.
fn describe_shell_exit(status: ExitStatus) -> String {
    match status {
        ExitStatus::Code(code) => format!("ended with exit code {code}"),
        ExitStatus::Signal(signal, _) => format!("was killed by signal {signal}"),
    }
}

/// Parses environment variables from the output of `env -0`. Returns `None` unless every entry ends
/// with NUL and has a name.
fn parse_variables(text: &[u8]) -> Option<Vec<(OsString, OsString)>> {
    let entries = text.strip_suffix(b"\0")?.split(|byte| *byte == 0);
    let parse = |entry: &[u8]| {
        let equals = entry.iter().position(|byte| *byte == b'=').filter(|position| *position > 0)?;
        let to_text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        Some((to_text(&entry[..equals]), to_text(&entry[equals + 1..])))
    };
    entries.map(parse).collect()
}

/// Returns the last nonempty lines of the activation script's output, each shortened, for an error
/// message. Values that look secret are hidden, because `set -x` prints them.
fn take_last_lines(printed: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(printed);
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let shorten = |line: &&str| {
        let end =
            (0..=line.len().min(MAX_ERROR_LINE_BYTES)).rev().find(|i| line.is_char_boundary(*i)).unwrap_or(0);
        hide_secret_values(&diagnostic::terminal_text::filter_line(&line[..end]))
    };
    lines[lines.len().saturating_sub(MAX_ERROR_OUTPUT_LINES)..].iter().map(shorten).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Evaluates `steps` in a new directory with these files, within `limit_ms`.
    fn evaluate(
        steps: Vec<ActivationStep>,
        files: &[(&str, &str)],
        limit_ms: u64,
    ) -> diagnostic::Result<EnvironmentChanges> {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let file = directory.path().join(name);
            fs::create_dir_all(file.parent().expect("a parent")).expect("created");
            fs::write(file, text).expect("written");
        }
        let mut run = crate::testing::sample_job().run;
        run.workdir = directory.path().to_owned();
        (run.activate, run.activate_timeout_ms) = (steps, limit_ms);
        activate_environments(&run, "h7", &[])
    }

    fn script(text: &str) -> diagnostic::Result<EnvironmentChanges> {
        evaluate(vec![ActivationStep::Script("dir's/env.sh".into())], &[("dir's/env.sh", text)], 30_000)
    }

    fn text(changes: &EnvironmentChanges, name: &str) -> Option<String> {
        let value = changes.added.get(OsStr::new(name)).or(changes.changed.get(OsStr::new(name)))?;
        Some(value.to_string_lossy().into_owned())
    }

    #[test]
    fn the_changes_of_a_script_are_separate_from_its_output() {
        let changes = script(
            "echo 'A=printed'; cd /; export A=$'two\\nlines' \"B=it's\" ; unset PATH; set -a; C=$#; false; :",
        )
        .expect("activated");
        assert_eq!(text(&changes, "A").as_deref(), Some("two\nlines"));
        assert_eq!((text(&changes, "B"), text(&changes, "C")), (Some("it's".into()), Some("0".into())));
        assert_eq!(changes.removed, ["PATH"]);
        assert!(
            !changes.changes_variable("PWD")
                && !changes.changes_variable("SHLVL")
                && changes.changes_variable("A"),
            "{changes:?}"
        );
        assert!(changes.added.keys().all(|name| !name.to_string_lossy().starts_with("__launch")));
    }

    #[test]
    fn steps_are_activated_in_their_order() {
        let steps = vec![
            ActivationStep::Venv("env".into()),
            ActivationStep::Script("conda.sh".into()),
            ActivationStep::Conda("torch".into()),
            ActivationStep::Modules(vec!["gcc/12".into(), "cuda".into()]),
        ];
        let files = [
            ("env/bin/activate", "export VIRTUAL_ENV=env ORDER=venv"),
            ("conda.sh", "conda() { export ORDER=\"$ORDER $*\"; }; module() { export ORDER=\"$ORDER $*\"; }"),
        ];
        let changes = evaluate(steps, &files, 30_000).expect("activated");
        assert_eq!(text(&changes, "ORDER").as_deref(), Some("venv activate torch load gcc/12 cuda"));
    }

    #[test]
    fn each_failure_has_a_code_and_the_name_of_the_host() {
        let error = script("echo first; echo 'no license' >&2; return 3").expect_err("failed");
        assert_eq!((error.code(), error.field("exit_code")), (codes::ACTIVATION_FAILED, Some(&3.into())));
        assert!(error.causes().last().is_some_and(|cause| cause == "no license"), "{error:?}");
        for (result, code) in [
            (script("exit 4"), codes::ACTIVATION_FAILED),
            (script("kill -9 $$"), codes::ACTIVATION_FAILED),
            (script("exec 9>/dev/null"), codes::ACTIVATION_FAILED),
            (script("printf x >&9"), codes::ACTIVATION_FAILED),
            (script("export A=$(head -c 3000000 /dev/zero | tr '\\0' x)"), codes::ACTIVATION_FAILED),
            (script("head -c 3000000 /dev/zero >&9"), codes::ACTIVATION_ENVIRONMENT_INVALID),
            (evaluate(vec![ActivationStep::Venv("e".into())], &[], 30_000), codes::ACTIVATION_VENV_MISSING),
            (
                evaluate(vec![ActivationStep::Script("s".into())], &[], 30_000),
                codes::ACTIVATION_SCRIPT_MISSING,
            ),
            (
                evaluate(vec![ActivationStep::Script("s".into())], &[("s", "sleep 60")], 200),
                codes::ACTIVATION_TIMEOUT,
            ),
        ] {
            let error = result.expect_err(code.name());
            assert_eq!((error.code(), error.field("host")), (code, Some(&"h7".into())), "{error:?}");
            assert!(error.message().contains("h7"), "{error}");
        }
    }

    #[test]
    fn missing_commands_are_named() {
        let without = |step: ActivationStep| {
            let hide = "unset -f conda module; unset CONDA_EXE MODULESHOME; export HOME=/nonexistent PATH=/nonexistent";
            evaluate(vec![ActivationStep::Script("hide.sh".into()), step], &[("hide.sh", hide)], 30_000)
        };
        // A machine with a central installation of Conda or modules finds it in its usual place.
        for (step, places, code) in [
            (
                ActivationStep::Conda("a".into()),
                &["/opt/conda", "/opt/miniforge3", "/opt/miniconda3", "/opt/anaconda3"][..],
                codes::ACTIVATION_CONDA_MISSING,
            ),
            (
                ActivationStep::Modules(vec!["a".into()]),
                &[
                    "/etc/profile.d/modules.sh",
                    "/etc/profile.d/lmod.sh",
                    "/usr/share/modules",
                    "/usr/share/Modules",
                    "/usr/share/lmod",
                ],
                codes::ACTIVATION_MODULES_MISSING,
            ),
        ] {
            let error = without(step).expect_err("missing");
            let is_installed = places.iter().any(|place| Path::new(place).exists());
            assert!(error.code() == code || is_installed, "{error:?}");
        }
    }

    #[test]
    fn paths_and_names_are_quoted() {
        let workdir = Path::new("/work dir");
        assert_eq!(quote_path(workdir, Path::new("a'b")), "'/work dir/a'\\''b'");
        assert_eq!(quote_path(workdir, Path::new("/x")), "'/x'");
        assert_eq!(quote_path(workdir, Path::new("~/envs/a")), "\"${HOME-}\"/'envs/a'");
        assert_eq!(quote_path(workdir, Path::new("~user/a")), "'/work dir/~user/a'");
    }

    #[test]
    fn only_complete_environments_are_parsed() {
        assert_eq!(parse_variables(b"A=\0B=x=y\0").map(|v| v.len()), Some(2));
        for wrong in [&b""[..], b"A=1", b"A\0", b"=1\0", b"A=1\0\0"] {
            assert_eq!(parse_variables(wrong), None, "{wrong:?}");
        }
    }
}
