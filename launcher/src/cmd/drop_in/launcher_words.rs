//! [`rewrite_launcher_command`]: recognizes the command line of another launcher by the name or
//! path of its program, or by `python -m MODULE`.
use super::{LauncherProgram, OtherLauncher};
use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
};

/// A module of Python that is the program of another launcher when `python -m` runs it.
struct LauncherModule {
    /// The name of the module, such as `torch.distributed.run`.
    name: &'static str,
    /// The launcher.
    launcher: OtherLauncher,
    /// The options of launch for the module.
    options: &'static [&'static str],
    /// The words of the launcher that the module implies.
    words: &'static [&'static str],
}

/// The modules of Python that are the programs of other launchers.
const MODULES: [LauncherModule; 4] = [
    LauncherModule {
        name: "torch.distributed.run",
        launcher: OtherLauncher::Torchrun,
        options: &[],
        words: &[],
    },
    LauncherModule {
        name: "torch.distributed.launch",
        launcher: OtherLauncher::Torchrun,
        options: &["--legacy"],
        words: &[],
    },
    LauncherModule {
        name: "accelerate.commands.launch",
        launcher: OtherLauncher::Accelerate,
        options: &[],
        words: &["launch"],
    },
    LauncherModule {
        name: "deepspeed.launcher.runner",
        launcher: OtherLauncher::Deepspeed,
        options: &[],
        words: &[],
    },
];

/// Rewrites a command line that starts with the name or path of another launcher, or with `python
/// -m MODULE`, to a drop-in command of launch: its name, its internal options, `--`, and the
/// arguments of the other launcher. `words` begin after the options of launch. Returns `None` for
/// other command lines, and for a drop-in command that needs no change.
pub(crate) fn rewrite_launcher_command(words: &[OsString]) -> Option<Vec<OsString>> {
    let (program, arguments) = words.split_first()?;
    let build = |launcher: OtherLauncher, options: Vec<OsString>, implied: &[&str]| {
        let name = OsString::from(launcher.name());
        let implied = implied.iter().map(OsString::from);
        std::iter::once(name).chain(options).chain([OsString::from("--")]).chain(implied).collect()
    };
    let mut rewritten: Vec<OsString>;
    let rest;
    if let Some(known) = LauncherProgram::from_name(program) {
        // A name that is also the name of a command of launch needs no change in these cases.
        let is_unchanged = known.name == known.launcher.name()
            && arguments.first().is_none_or(|next| ["--", "-h", "--help"].iter().any(|word| next == word));
        if is_unchanged {
            return None;
        }
        (rewritten, rest) = (build(known.launcher, Vec::new(), known.words), arguments);
    } else if let Some(known) = LauncherProgram::from_path(program).filter(|_| is_executable(program)) {
        let options = vec![OsString::from("--original"), program.clone()];
        (rewritten, rest) = (build(known.launcher, options, known.words), arguments);
    } else {
        let (module, module_arguments) =
            is_python(program).then(|| split_module_arguments(arguments)).flatten()?;
        let module = MODULES.iter().find(|known| known.name == module)?;
        let options = [OsString::from("--python"), program.clone()];
        let options = options.into_iter().chain(module.options.iter().map(OsString::from)).collect();
        (rewritten, rest) = (build(module.launcher, options, module.words), module_arguments);
    }
    rewritten.extend(rest.iter().cloned());
    Some(rewritten)
}

/// Returns whether a word is the name or path of a Python interpreter, such as `python3.12`.
fn is_python(program: &OsStr) -> bool {
    let name = Path::new(program).file_name().and_then(OsStr::to_str).unwrap_or_default();
    let version = name.strip_prefix("python").or_else(|| name.strip_prefix("pypy"));
    version.is_some_and(|version| version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
}

/// Returns whether the path `program` is that of an executable file.
fn is_executable(program: &OsStr) -> bool {
    fs::metadata(program).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

/// Splits the arguments of a Python interpreter into the module that `-m` names and the arguments
/// of the module. Returns `None` if the arguments run no module.
fn split_module_arguments(arguments: &[OsString]) -> Option<(&str, &[OsString])> {
    let mut at = 0;
    loop {
        let letters = arguments.get(at)?.to_str()?.strip_prefix('-')?;
        if letters.is_empty() || letters.starts_with('-') {
            return None;
        }
        at += 1;
        // Several options can share a word, as in `-um`. The value of an option follows its letter
        // or is the next word.
        let Some(position) = letters.find(['m', 'c', 'W', 'X']) else { continue };
        let (letter, attached) = (letters.as_bytes()[position], &letters[position + 1..]);
        let value = if attached.is_empty() { arguments.get(at)?.to_str()? } else { attached };
        at += usize::from(attached.is_empty());
        match letter {
            b'm' => return Some((value, &arguments[at..])),
            b'c' => return None,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rewrites the words of a line, and returns the new line.
    fn rewrite(line: &str) -> Option<String> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let words = rewrite_launcher_command(&words)?;
        Some(words.iter().map(|word| word.to_str().expect("text")).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn launchers_are_recognized_by_name_and_module() {
        for (line, expected) in [
            ("torchrun --nnodes 1 a.py", "torchrun -- --nnodes 1 a.py"),
            ("python -m torch.distributed.run a.py x", "torchrun --python python -- a.py x"),
            (
                "/venv/bin/python3.12 -u -X dev -Wignore -m torch.distributed.launch --use_env a.py",
                "torchrun --python /venv/bin/python3.12 --legacy -- --use_env a.py",
            ),
            ("python3 -um accelerate.commands.launch a.py", "accelerate --python python3 -- launch a.py"),
            ("pypy3 -Im deepspeed.launcher.runner a.py", "deepspeed --python pypy3 -- a.py"),
            ("accelerate-launch --cpu a.py", "accelerate -- launch --cpu a.py"),
            ("accelerate-launch --help", "accelerate -- launch --help"),
            ("accelerate-launch", "accelerate -- launch"),
            ("python -mtorch.distributed.run", "torchrun --python python --"),
        ] {
            assert_eq!(rewrite(line).as_deref(), Some(expected), "{line}");
        }
    }

    #[test]
    fn other_command_lines_are_unchanged() {
        for line in [
            "torchrun",
            "torchrun --help",
            "torchrun -- a.py",
            "job.yaml",
            "./torchrun a.py",
            "python a.py -m torch.distributed.run",
            "python -c pass -m torch.distributed.run",
            "python -m http.server",
            "python -m",
            "python - -m torch.distributed.run",
            "pythonic -m torch.distributed.run a.py",
        ] {
            assert_eq!(rewrite(line), None, "{line}");
        }
    }

    #[test]
    fn a_launcher_is_recognized_by_its_path_if_it_is_executable() {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, words) in [("torchrun", ""), ("accelerate-launch", " launch")] {
            let program = directory.path().join(name);
            fs::write(&program, "name: job\n").expect("written");
            let line = format!("{} a.py", program.display());
            assert_eq!(rewrite(&line), None);
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("changed");
            let command = name.split('-').next().expect("a name");
            let expected = format!("{command} --original {} --{words} a.py", program.display());
            assert_eq!(rewrite(&line), Some(expected));
        }
    }
}
