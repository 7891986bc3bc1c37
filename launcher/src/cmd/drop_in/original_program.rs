//! Finds the original torchrun, accelerate or deepspeed in PATH and its Python, and replaces this
//! process by the original program.
use super::other_launcher::OtherLauncher;
use diagnostic::{Diagnostic, codes::command};
use jobspec::env;
use nix::sys::signal::{SigHandler, Signal, signal};
use std::{
    ffi::OsString,
    fs::{self, File},
    io::Read,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

/// The number of bytes at the start of a script in which its interpreter is searched.
const MAX_SCRIPT_HEADER_BYTES: u64 = 4096;

/// Replaces this process by the original program with the arguments `arguments`. `given` is the
/// path of the program, if the user gave a path; otherwise the program is searched in PATH. Returns
/// only if that fails, with the error.
pub(super) fn exec_original_program(
    launcher: OtherLauncher,
    given: Option<&Path>,
    arguments: &[OsString],
) -> Diagnostic {
    let name = launcher.name();
    let Some(program) = given.map(Path::to_owned).or_else(|| find_program_in_path(name)) else {
        let shown = arguments.first().map(|first| format!(" {}", first.display())).unwrap_or_default();
        let message = format!("`{name}{shown}` needs the original {name}, which is not in PATH");
        let help = format!("install {name}, or activate its Python environment");
        return Diagnostic::error(command::DROP_IN_ORIGINAL_MISSING, message)
            .with_subject(name)
            .with_help(help);
    };
    // The program gets the default action of the signal that launch ignores.
    // SAFETY: the default action runs no code of this program.
    _ = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigDfl) };
    let error = Command::new(&program).args(arguments).exec();
    Diagnostic::error(command::DROP_IN_ORIGINAL_MISSING, format!("cannot run {}", program.display()))
        .with_subject(name)
        .with_cause(&error)
}

/// Returns the absolute path of the Python `python` that the user named: a path, or a program in
/// PATH, as in Python's `sys.executable`. Fails if PATH does not contain the program.
pub(super) fn resolve_python(python: &Path) -> diagnostic::Result<String> {
    let path = match python.to_str() {
        Some(name) if !name.contains('/') => find_program_in_path(name),
        _ => std::path::absolute(python).ok(),
    };
    path.map(|path| path.display().to_string()).ok_or_else(|| {
        let message = format!("`{}` is not in PATH", python.display());
        Diagnostic::error(command::DROP_IN_PYTHON_MISSING, message)
            .with_help("activate the Python environment of the script")
    })
}

/// Returns the path of the Python interpreter of the original program (such as torchrun), or of the
/// first `python` or `python3` in PATH. `given` is the path of the original program, if the user
/// gave a path. If there is no Python, returns `python` for a command line with `--no-python`, and
/// fails for any other.
pub(super) fn find_python(
    launcher: OtherLauncher,
    given: Option<&Path>,
    words: &[String],
) -> diagnostic::Result<String> {
    let original = given.map(Path::to_owned).or_else(|| find_program_in_path(launcher.name()));
    let interpreter = original.and_then(|program| read_script_interpreter(&program));
    let python =
        interpreter.or_else(|| find_program_in_path("python")).or_else(|| find_program_in_path("python3"));
    let is_optional = words.iter().any(|word| word.replace('_', "-") == "--no-python")
        || launcher == OtherLauncher::Torchrun && std::env::var_os(env::PYTHON_EXEC).is_some();
    match python {
        Some(python) => Ok(python.display().to_string()),
        None if is_optional => Ok("python".to_owned()),
        None => {
            let message = format!("found no Python to run the script of {}", launcher.name());
            Err(Diagnostic::error(command::DROP_IN_PYTHON_MISSING, message)
                .with_help("activate the Python environment of the script"))
        }
    }
}

/// Returns the first executable file with the name `name` in PATH that is not launch itself.
fn find_program_in_path(name: &str) -> Option<PathBuf> {
    let launch = fs::canonicalize("/proc/self/exe").ok();
    let path = std::env::var_os(env::PATH)?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| {
        let is_executable =
            fs::metadata(file).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0);
        is_executable && fs::canonicalize(file).ok() != launch
    })
}

/// Returns the path of the Python that runs the script `program`, from its first lines:
/// `#!/path/python`, or `'''exec' /path/python "$0" "$@"`. Returns `None` for other files.
fn read_script_interpreter(program: &Path) -> Option<PathBuf> {
    let mut header = Vec::new();
    File::open(program).ok()?.take(MAX_SCRIPT_HEADER_BYTES).read_to_end(&mut header).ok()?;
    let text = String::from_utf8_lossy(&header);
    let mut lines = text.lines();
    let first = lines.next()?.strip_prefix("#!")?.trim();
    let path = match lines.next().and_then(|second| second.strip_prefix("'''exec' ")) {
        Some(command) => match command.strip_prefix('"') {
            Some(quoted) => quoted.split('"').next()?,
            None => command.split_whitespace().next()?,
        },
        None => first,
    };
    let path = Path::new(path);
    let name = path.file_name()?.to_str()?;
    let is_python = name.starts_with("python") || name.starts_with("pypy");
    (is_python && path.is_absolute() && path.is_file()).then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interpreter_of_a_script_is_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let python = directory.path().join("python3");
        fs::write(&python, "").expect("written");
        let script = directory.path().join("torchrun");
        let shown = python.display();
        for (text, found) in [
            (format!("#!{shown}\nimport x\n"), true),
            (format!("#!/bin/sh\n'''exec' {shown} \"$0\" \"$@\"\n' '''\n"), true),
            (format!("#!/bin/sh\n'''exec' \"{shown}\" \"$0\" \"$@\"\n' '''\n"), true),
            ("#!/usr/bin/env python3\n".to_owned(), false),
            ("#!/bin/sh\npython \"$0\"\n".to_owned(), false),
            ("\u{7f}ELF".to_owned(), false),
        ] {
            fs::write(&script, &text).expect("written");
            assert_eq!(read_script_interpreter(&script), found.then(|| python.clone()), "{text}");
        }
    }
}
