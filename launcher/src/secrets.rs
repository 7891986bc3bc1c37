//! Values of `run.env` that are given by reference: looked up once, handed to the workers, shown to nobody.
use crate::plan::is_device_variable;
use contract::{
    env::{USERS_CHOICE, looks_secret},
    job::{EnvSource, JobSpec, RunSpec, is_reserved},
    preflight::Finding,
};
use globset::{Glob, GlobMatcher};
use std::{env, ffi::OsString, fmt, fs::File, io::Read, path::Path};

/// What stands for a value that is shown nowhere.
pub(crate) const HIDDEN: &str = "***";
/// Most variables that patterns may pass, and bytes of them.
const MAX_PASSED: usize = 4096;
const MAX_PASSED_BYTES: usize = 1 << 20;
/// Longest value, bytes.
const MAX_VALUE: u64 = 64 << 10;

/// Names and values that no text may contain: `Debug` gives the names alone.
#[derive(Clone, Default)]
pub struct Secrets {
    /// Values by reference.
    referred: Vec<(String, String)>,
    /// Launch's own, that patterns pass on.
    passed: Vec<(String, String)>,
}

impl Secrets {
    /// For the environment of a worker.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (String, String)> {
        self.passed.iter().chain(&self.referred).cloned()
    }

    /// Names that patterns pass on.
    pub(crate) fn passed(&self) -> impl Iterator<Item = &str> {
        self.passed.iter().map(|(name, _)| name.as_str())
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.passed.iter().chain(&self.referred).map(|(name, _)| name)).finish()
    }
}

/// Looks all of them up; or says which can't be had.
pub(crate) fn resolve(run: &RunSpec) -> Result<Secrets, Vec<Finding>> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for (name, source) in &run.env_from {
        let value = match source {
            EnvSource::FromEnv(from) => from_env(from),
            EnvSource::FromFile(path) => from_file(&run.workdir.join(path)),
        };
        match value {
            Ok(value) => found.push((name.clone(), value)),
            Err(why) => missing.push(Finding {
                path: format!("run.env.{name}"),
                message: format!("`{name}` has no value: {why}"),
                hint: None,
            }),
        }
    }
    let passed = passed(run, env::vars_os()).map_err(|message| {
        let hint = Some("a narrower pattern passes less".to_owned());
        vec![Finding { path: "run.pass_env".to_owned(), message, hint }]
    })?;
    if missing.is_empty() { Ok(Secrets { referred: found, passed }) } else { Err(missing) }
}

/// A job as it may be shown and written down: values whose names say that nobody may read them are left out.
pub(crate) fn hide(job: &JobSpec) -> JobSpec {
    let mut shown = job.clone();
    for (name, value) in &mut shown.run.env {
        if looks_secret(name) && !value.is_empty() {
            HIDDEN.clone_into(value);
        }
    }
    shown
}

/// The variables that `run.pass_env` means; never those that launch or the job sets.
fn passed(
    run: &RunSpec,
    own: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Vec<(String, String)>, String> {
    let globs = run.pass_env.iter().map(|p| Glob::new(p).map(|g| g.compile_matcher()));
    let globs: Vec<GlobMatcher> =
        globs.collect::<Result<_, _>>().map_err(|e| format!("a pattern can't be read: {e}"))?;
    let decided = |name: &str| {
        is_reserved(name)
            || is_device_variable(name)
            || USERS_CHOICE.contains(&name)
            || run.env.iter().any(|(own, _)| own == name)
            || run.env_from.iter().any(|(own, _)| own == name)
    };
    // What isn't text can't be said in a message; the worker on this machine has it anyway.
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    let wanted = |(name, _): &(String, String)| globs.iter().any(|g| g.is_match(name)) && !decided(name);
    let mut found: Vec<_> = own.filter_map(text).filter(wanted).collect();
    found.sort();
    let bytes: usize = found.iter().map(|(name, value)| name.len() + value.len()).sum();
    match found.len() > MAX_PASSED || bytes > MAX_PASSED_BYTES {
        true => Err(format!("{} variables with {bytes} bytes are more than can be passed on", found.len())),
        false => Ok(found),
    }
}

fn from_env(name: &str) -> Result<String, String> {
    // Such a name is none, and asking for it panics.
    let value = if name.contains(['=', '\0']) { None } else { env::var_os(name) };
    let value = value.ok_or_else(|| format!("the variable `{name}` isn't set where launch runs"))?;
    value.into_string().map_err(|_| format!("the variable `{name}` isn't UTF-8 text"))
}

fn from_file(path: &Path) -> Result<String, String> {
    let file = path.display();
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|f| f.take(MAX_VALUE + 3).read_to_end(&mut bytes));
    read.map_err(|error| format!("{file} can't be read: {error}"))?;
    let mut value = String::from_utf8(bytes).map_err(|_| format!("{file} isn't UTF-8 text"))?;
    let line_end = if value.ends_with("\r\n") { 2 } else { usize::from(value.ends_with('\n')) };
    value.truncate(value.len() - line_end);
    match value {
        value if value.len() as u64 > MAX_VALUE => Err(format!("{file} has more than {MAX_VALUE} bytes")),
        value if value.contains('\0') => Err(format!("{file} has a NUL character")),
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn looked_up(name: &str, source: EnvSource, place: &Path) -> Result<String, String> {
        let mut run = crate::testing::job().run;
        run.workdir = place.to_owned();
        run.env_from = vec![(name.to_owned(), source)];
        match resolve(&run) {
            Ok(secrets) => {
                assert_eq!(format!("{secrets:?}"), format!("{{{name:?}}}"), "the value is not shown");
                Ok(secrets.pairs().next().expect("a value").1)
            }
            Err(findings) => {
                assert_eq!(findings[0].path, format!("run.env.{name}"));
                Err(findings[0].message.clone())
            }
        }
    }

    #[test]
    fn patterns_pass_what_nobody_else_decides() {
        let mut run = crate::testing::job().run;
        run.pass_env = vec!["HF_*".into(), "RANK".into(), "*_DEVICES".into(), "A?".into()];
        run.env = vec![("HF_HOME".into(), "/mine".into())];
        let own = [
            ("HF_TOKEN", "t"),
            ("HF_HOME", "/h"),
            ("RANK", "7"),
            ("CUDA_VISIBLE_DEVICES", "1"),
            ("AB", "c"),
            ("A", "d"),
        ];
        let own = || own.iter().map(|(n, v)| (OsString::from(n), OsString::from(v)));
        let found = passed(&run, own()).expect("few");
        assert_eq!(found, [("AB", "c"), ("HF_TOKEN", "t")].map(|(n, v)| (n.to_owned(), v.to_owned())));
        let many = (0..=MAX_PASSED).map(|i| (OsString::from(format!("HF_{i}")), OsString::new()));
        assert!(passed(&run, many).is_err());
    }

    #[test]
    fn what_looks_like_a_secret_is_not_shown() {
        let mut job = crate::testing::job();
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
        let shown: Vec<String> = hide(&job).run.env.into_iter().map(|(_, v)| v).collect();
        assert_eq!(shown, [HIDDEN, HIDDEN, "v", "v", HIDDEN, "v"]);
    }

    #[test]
    fn values_come_from_files() {
        let place = tempfile::tempdir().expect("a directory");
        for (content, expected) in [
            (&b"token\n"[..], Ok("token")),
            (b"token\r\n", Ok("token")),
            (b"two\nlines\n\n", Ok("two\nlines\n")),
            (b"", Ok("")),
            (b"\xff", Err("isn't UTF-8")),
            (b"a\0b", Err("NUL")),
            (&[b'x'; (64 << 10) + 1][..], Err("more than 65536")),
        ] {
            fs::write(place.path().join("f"), content).expect("written");
            let found = looked_up("A", EnvSource::FromFile("f".into()), place.path());
            match expected {
                Ok(value) => assert_eq!(found.as_deref(), Ok(value)),
                Err(part) => assert!(found.expect_err("refused").contains(part)),
            }
        }
        let absent = looked_up("A", EnvSource::FromFile("absent".into()), place.path());
        assert!(absent.expect_err("refused").contains("absent can't be read: No such file"));
    }

    #[test]
    fn values_come_from_the_environment() {
        let from = |name: &str| looked_up("A", EnvSource::FromEnv(name.to_owned()), Path::new("/"));
        assert_eq!(from("PATH").ok(), env::var("PATH").ok());
        for name in ["LAUNCH_TEST_NEVER_SET", "A=B", ""] {
            let why = from(name).expect_err("refused");
            assert_eq!(why, format!("`A` has no value: the variable `{name}` isn't set where launch runs"));
        }
    }
}
