//! Values of `run.env` that are given by reference: looked up once, handed to the workers, shown to nobody.
use contract::{
    job::{EnvSource, RunSpec},
    judge::Finding,
};
use std::{env, fmt, fs::File, io::Read, path::Path};

/// Longest value, bytes.
const MAX_VALUE: u64 = 64 << 10;

/// Names and values that no text may contain: `Debug` gives the names alone.
#[derive(Clone, Default)]
pub struct Secrets(Vec<(String, String)>);

impl Secrets {
    /// For the environment of a worker.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (String, String)> {
        self.0.iter().cloned()
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.iter().map(|(name, _)| name)).finish()
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
    if missing.is_empty() { Ok(Secrets(found)) } else { Err(missing) }
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
