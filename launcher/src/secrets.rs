//! [`SecretVariables`]: environment variables whose values must stay secret.
//!
//! These are the variables of `run.env` whose values come from references, and the variables that
//! `run.pass_env` selects. Their values are read once and passed to the workers. They are never
//! printed or stored.
use diagnostic::{
    Diagnostic,
    codes::{host, job},
};
use globset::{Glob, GlobMatcher};
use jobspec::{
    EnvSource, JobSpec, RunSpec,
    env::{USER_OVERRIDABLE_VARIABLES, is_device_variable, is_probable_secret_name},
    hide_secret_arguments, hide_secret_values, is_reserved_variable, read_input_file,
};
use std::{borrow::Cow, env, ffi::OsString, fmt, path::Path};

/// The text that is printed and stored in place of a secret value.
pub(crate) const REDACTED: &str = "***";
/// The largest number of environment variables of the user that `run.pass_env` may pass on to
/// workers.
const MAX_PASSED_VARIABLES: usize = 4096;
/// The largest total size in bytes of the names and values of environment variables that
/// `run.pass_env` may pass on to workers.
const MAX_PASSED_BYTES: usize = 1 << 20;
/// The largest size of a file with the value of a secret variable, in bytes.
const MAX_VALUE_BYTES: u64 = 64 << 10;

/// The environment variables of a job's workers whose values must not be printed or stored, with
/// their values. The `Debug` form contains only the names.
#[derive(Clone, Default)]
pub(crate) struct SecretVariables {
    /// The variables of `run.env` whose values come from a file or from another variable
    /// (`from_file`, `from_env`), with the values.
    referenced: Vec<(String, String)>,
    /// The variables of launch's environment that `run.pass_env` selects, with the values.
    passed: Vec<(String, String)>,
}

impl SecretVariables {
    /// Collects the secret variables of a running job from the environment of one of its workers,
    /// when a new controller takes over the run.
    pub(crate) fn from_worker_env(run: &RunSpec, env: &[(String, String)]) -> SecretVariables {
        let find = |(name, _): &(String, EnvSource)| env.iter().rfind(|(other, _)| other == name).cloned();
        let pairs = env.iter().map(|(name, value)| (name.into(), value.into()));
        // The patterns were valid when the run began.
        let passed = select_passed_variables(run, pairs).unwrap_or_default();
        SecretVariables { referenced: run.env_from.iter().filter_map(find).collect(), passed }
    }

    /// Returns an iterator over the names and values of the secret variables, which are added to
    /// the environment of each worker.
    pub(crate) fn names_and_values(&self) -> impl Iterator<Item = (String, String)> {
        self.passed.iter().chain(&self.referenced).cloned()
    }

    /// Returns an iterator over the names of the user's environment variables that `run.pass_env`
    /// passes on to workers.
    pub(crate) fn passed_names(&self) -> impl Iterator<Item = &str> {
        self.passed.iter().map(|(name, _)| name.as_str())
    }
}

impl fmt::Debug for SecretVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.passed.iter().chain(&self.referenced).map(|(name, _)| name)).finish()
    }
}

/// Reads the values of the secret variables of workers from the sources that `run.env` and
/// `run.pass_env` name. The error lists every variable whose value cannot be used.
pub(crate) fn resolve_secret_variables(run: &RunSpec) -> Result<SecretVariables, Vec<Diagnostic>> {
    let (mut referenced, mut errors) = (Vec::new(), Vec::new());
    for (name, source) in &run.env_from {
        let value = match source {
            EnvSource::FromEnv(variable) => read_launch_env_variable(name, variable),
            EnvSource::FromFile(path) => read_value_file(name, &run.workdir.join(path)),
        };
        match value {
            Ok(value) => referenced.push((name.clone(), value)),
            Err(error) => errors.push(error.with_subject(format!("run.env.{name}"))),
        }
    }
    let passed = select_passed_variables(run, env::vars_os())
        .map_err(|error| vec![error.with_subject("run.pass_env")])?;
    if errors.is_empty() { Ok(SecretVariables { referenced, passed }) } else { Err(errors) }
}

/// Returns the value of an environment variable in a form that may be printed. The value of a
/// probable secret is replaced, and probable secrets within another value, such as a line
/// `HF_TOKEN=…` or the password of a URL, are hidden.
pub(crate) fn redact_secret_value<'a>(name: &str, value: &'a str) -> Cow<'a, str> {
    match is_probable_secret_name(name) && !value.is_empty() {
        true => REDACTED.into(),
        false => hide_secret_values(value).into(),
    }
}

/// Returns a copy of the job that may be printed and stored, in which placeholders replace the
/// values of probable secrets. In the copy, [`REDACTED`] replaces values of `run.env` and of
/// options in `run.command` whose names suggest a secret, and passwords of URLs there are hidden.
pub(crate) fn redact_job_secrets(job: &JobSpec) -> JobSpec {
    let mut redacted = job.clone();
    for (name, value) in &mut redacted.run.env {
        *value = redact_secret_value(name, value).into_owned();
    }
    for item in &mut redacted.run.wrap {
        item.command = hide_secret_arguments(&item.command);
    }
    if let Some(container) = &mut redacted.run.container {
        container.options = hide_secret_arguments(&container.options);
    }
    redacted.run.command = redacted.run.command.map(|words| hide_secret_arguments(&words));
    redacted
}

/// Returns those variables of an environment whose names match the patterns of `run.pass_env`, in
/// the order of their names. Leaves out variables that launch or `run.env` sets, those that select
/// GPUs, and those of [`USER_OVERRIDABLE_VARIABLES`]. Fails if a pattern is not valid, or if too
/// many variables match.
pub(crate) fn select_passed_variables(
    run: &RunSpec,
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> diagnostic::Result<Vec<(String, String)>> {
    let globs = run.pass_env.iter().map(|p| Glob::new(p).map(|g| g.compile_matcher()));
    let globs: Vec<GlobMatcher> = globs.collect::<Result<_, _>>().map_err(|error| {
        Diagnostic::error(host::PASS_ENV_INVALID, "a pattern of `run.pass_env` is not valid")
            .with_cause(&error)
    })?;
    let is_set_elsewhere = |name: &str| {
        is_reserved_variable(name)
            || is_device_variable(name)
            || USER_OVERRIDABLE_VARIABLES.contains(&name)
            || run.env.iter().any(|(set, _)| set == name)
            || run.env_from.iter().any(|(set, _)| set == name)
    };
    // Control messages carry UTF-8 only. A worker on this machine inherits other variables anyway.
    let utf8 =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    let is_selected =
        |(name, _): &(String, String)| globs.iter().any(|g| g.is_match(name)) && !is_set_elsewhere(name);
    let mut passed: Vec<_> = environment.filter_map(utf8).filter(is_selected).collect();
    passed.sort_unstable();
    let bytes: usize = passed.iter().map(|(name, value)| name.len() + value.len()).sum();
    if passed.len() > MAX_PASSED_VARIABLES || bytes > MAX_PASSED_BYTES {
        let message = format!(
            "`run.pass_env` selects {} variables of {bytes} bytes; at most {MAX_PASSED_VARIABLES} variables of \
             {MAX_PASSED_BYTES} bytes can be passed",
            passed.len()
        );
        return Err(Diagnostic::error(job::JOB_PASS_ENV_TOO_LARGE, message)
            .with_field("variables", passed.len())
            .with_field("bytes", bytes)
            .with_help("use narrower patterns"));
    }
    Ok(passed)
}

/// Reads the environment variable `variable` of launch, whose value becomes that of a worker's
/// variable (`from_env` in job.yaml). Error messages name the job's variable `name`, which gets the
/// value.
fn read_launch_env_variable(name: &str, variable: &str) -> diagnostic::Result<String> {
    // `var_os` panics for names that no variable can have.
    let value = if variable.contains(['=', '\0']) { None } else { env::var_os(variable) };
    let value = value.ok_or_else(|| {
        let message =
            format!("`{name}` has no value: the variable `{variable}` is not set in launch's environment");
        Diagnostic::error(job::JOB_ENV_VALUE_MISSING, message).with_field("variable", variable)
    })?;
    value.into_string().map_err(|_| {
        let message = format!("`{name}` has no value: the variable `{variable}` is not UTF-8 text");
        Diagnostic::error(host::ENV_VALUE_INVALID, message).with_field("variable", variable)
    })
}

/// Reads a text file whose content, without the final line break, becomes the value of a worker's
/// environment variable (`from_file` in job.yaml). Error messages name the job's variable `name`,
/// which gets the value.
fn read_value_file(name: &str, path: &Path) -> diagnostic::Result<String> {
    let file = path.display().to_string();
    let invalid = |reason: &str| {
        let message = format!("`{name}` has no value: {file} {reason}");
        Diagnostic::error(host::ENV_VALUE_INVALID, message).with_field("file", file.as_str())
    };
    let bytes = read_input_file(path, MAX_VALUE_BYTES + 2).map_err(|error| {
        let message = format!("`{name}` has no value: cannot read {file}");
        Diagnostic::error(job::JOB_ENV_VALUE_MISSING, message)
            .with_field("file", file.as_str())
            .with_cause(&error)
    })?;
    let mut value = String::from_utf8(bytes).map_err(|_| invalid("is not UTF-8 text"))?;
    let line_end = if value.ends_with("\r\n") { 2 } else { usize::from(value.ends_with('\n')) };
    value.truncate(value.len() - line_end);
    match value {
        value if value.len() as u64 > MAX_VALUE_BYTES => {
            Err(invalid(&format!("is longer than {MAX_VALUE_BYTES} bytes")))
        }
        value if value.contains('\0') => Err(invalid("contains a NUL character")),
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diagnostic::Code;
    use std::fs;

    /// Resolves a variable of `run.env` that refers to `source`. Returns its value, or the code of
    /// the error. Checks that `Debug` does not show the value.
    fn resolve_one(source: EnvSource, workdir: &Path) -> Result<String, Code> {
        let mut run = crate::testing::sample_job().run;
        run.workdir = workdir.to_owned();
        run.env_from = vec![("A".to_owned(), source)];
        match resolve_secret_variables(&run) {
            Ok(secrets) => {
                assert_eq!(format!("{secrets:?}"), "{\"A\"}", "the value is not shown");
                Ok(secrets.names_and_values().next().expect("a value").1)
            }
            Err(errors) => {
                assert_eq!(errors[0].subject(), Some("run.env.A"));
                Err(errors[0].code())
            }
        }
    }

    #[test]
    fn the_environment_of_a_worker_contains_the_secrets() {
        let mut run = crate::testing::sample_job().run;
        run.pass_env = vec!["HF_*".into()];
        run.env_from = vec![("TOKEN".into(), EnvSource::FromEnv("T".into()))];
        let env = [("TOKEN", "t"), ("HF_TOKEN", "h"), ("RANK", "0"), ("OTHER", "x")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let secrets = SecretVariables::from_worker_env(&run, &env);
        let pairs: Vec<_> =
            secrets.names_and_values().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(pairs, ["HF_TOKEN=h", "TOKEN=t"]);
    }

    #[test]
    fn patterns_pass_variables_that_nothing_else_sets() {
        let mut run = crate::testing::sample_job().run;
        run.pass_env = vec!["HF_*".into(), "RANK".into(), "*_DEVICES".into(), "A?".into()];
        run.env = vec![("HF_HOME".into(), "/mine".into())];
        let environment = [
            ("HF_TOKEN", "t"),
            ("HF_HOME", "/h"),
            ("RANK", "7"),
            ("CUDA_VISIBLE_DEVICES", "1"),
            ("AB", "c"),
            ("A", "d"),
        ];
        let environment = environment.iter().map(|(n, v)| (OsString::from(n), OsString::from(v)));
        let passed = select_passed_variables(&run, environment).expect("few variables");
        assert_eq!(passed, [("AB", "c"), ("HF_TOKEN", "t")].map(|(n, v)| (n.to_owned(), v.to_owned())));
        let many = (0..=MAX_PASSED_VARIABLES).map(|i| (OsString::from(format!("HF_{i}")), OsString::new()));
        let error = select_passed_variables(&run, many).expect_err("too many");
        assert_eq!(error.code(), job::JOB_PASS_ENV_TOO_LARGE);
    }

    #[test]
    fn values_with_secret_names_are_redacted() {
        let mut job = crate::testing::sample_job();
        for name in [
            "HF_TOKEN",
            "aws_secret_access_key",
            "MAX_TOKENS",
            "TOKENIZERS_PARALLELISM",
            "WANDB_API_KEY",
            "KEYBOARD",
        ] {
            job.run.env.push((name.to_owned(), "v".to_owned()));
        }
        let values: Vec<String> = redact_job_secrets(&job).run.env.into_iter().map(|(_, v)| v).collect();
        assert_eq!(values, [REDACTED, REDACTED, "v", "v", REDACTED, "v"]);
        job.run.env = vec![("PROXY".into(), "http://user:abc@host".into())];
        assert_eq!(redact_job_secrets(&job).run.env[0].1, "http://user:***@host");
        // The lines of a block scalar.
        job.run.env = vec![("DOTENV".into(), "A=b\nHF_TOKEN=abc\nC=d\n".into())];
        assert_eq!(redact_job_secrets(&job).run.env[0].1, "A=b\nHF_TOKEN=***\nC=d\n");
        job.run.command =
            Some(vec!["sh".into(), "-c".into(), "export HF_TOKEN=abc\nprog --token d\n".into()]);
        let command = redact_job_secrets(&job).run.command.expect("a command");
        assert_eq!(command[2], "export HF_TOKEN=***\nprog --token *\n");
    }

    #[test]
    fn values_come_from_files() {
        let dir = tempfile::tempdir().expect("a directory");
        for (content, expected) in [
            (&b"token\n"[..], Ok("token")),
            (b"token\r\n", Ok("token")),
            (b"two\nlines\n\n", Ok("two\nlines\n")),
            (b"", Ok("")),
            (b"\xff", Err(host::ENV_VALUE_INVALID)),
            (b"a\0b", Err(host::ENV_VALUE_INVALID)),
            (&[b'x'; (64 << 10) + 1][..], Err(host::ENV_VALUE_INVALID)),
        ] {
            fs::write(dir.path().join("f"), content).expect("a file");
            let value = resolve_one(EnvSource::FromFile("f".into()), dir.path());
            assert_eq!(value, expected.map(str::to_owned));
        }
        let absent = resolve_one(EnvSource::FromFile("absent".into()), dir.path());
        assert_eq!(absent, Err(job::JOB_ENV_VALUE_MISSING));
    }

    #[test]
    fn values_come_from_the_environment() {
        let value = |name: &str| resolve_one(EnvSource::FromEnv(name.to_owned()), Path::new("/"));
        assert_eq!(value("PATH").ok(), env::var("PATH").ok());
        for name in ["LAUNCH_TEST_NEVER_SET", "A=B", ""] {
            assert_eq!(value(name), Err(job::JOB_ENV_VALUE_MISSING), "{name:?}");
        }
    }
}
