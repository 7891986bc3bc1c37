//! [`build_worker_command`]: the command of the workers of a torchrun command line. It replaces
//! torchrun's macros, whose values can differ between workers.
use super::arguments::{PROGRAM_NAME, TorchProgram};
use crate::import::{
    command_line::CommandLine,
    drop_in::{DropInContext, ProgramForm, build_env_command, create_unsupported_option_error},
};
use diagnostic::Diagnostic;
use jobspec::env;

/// Builds the command of each worker, such as `python -u SCRIPT`, for a torchrun command line with
/// `workers` workers per host, and removes the options that determine this command.
pub(super) fn build_worker_command(
    program: TorchProgram,
    given: &mut CommandLine,
    context: &DropInContext<'_>,
    workers: i64,
) -> Result<Vec<String>, Diagnostic> {
    let (module, no_python) = (given.take_flag("module"), given.take_flag("no-python"));
    let run_path = given.take_flag("run-path");
    let gives_local_rank = !given.take_flag("use-env") && program == TorchProgram::LegacyLaunch;
    if module && no_python && !run_path {
        let reason = "it contradicts `--no-python`, as in torchrun";
        return Err(create_unsupported_option_error(PROGRAM_NAME, "--module", reason, "remove one of them"));
    }
    if gives_local_rank && no_python {
        let reason = "it requires `--use-env`, as in torch.distributed.launch";
        return Err(create_unsupported_option_error(PROGRAM_NAME, "--no-python", reason, "add `--use-env`"));
    }
    // With --run-path torchrun runs the script inside a Python process, which the script does not
    // notice.
    let form = match run_path {
        true => ProgramForm { unbuffered: true, ..ProgramForm::default() },
        false => ProgramForm { module, no_python, unbuffered: true },
    };
    let python = context.user_env_variable(env::PYTHON_EXEC).unwrap_or(context.python);
    let (script, arguments) = given.program.split_at(1);
    let mut words: Vec<Vec<String>> = Vec::new();
    words.extend(form.build_command(python, script).into_iter().map(|word| vec![word]));
    words.extend(gives_local_rank.then(|| vec!["--local-rank=".to_owned(), String::new()]));
    words.extend(arguments.iter().map(|argument| split_at_local_rank(argument)));
    let command = match words.iter().any(|parts| parts.len() > 1) {
        true if workers > 1 && given.last_value("virtual-local-rank").is_some() => {
            let reason = "the variable LOCAL_RANK is 0 in all workers";
            let help = "remove `--virtual-local-rank`";
            return Err(create_unsupported_option_error(PROGRAM_NAME, "${local_rank}", reason, help));
        }
        true if workers > 1 => build_shell_command(&words),
        _ => words.iter().map(|parts| parts.join("0")).collect(),
    };
    let variables = [(env::ROLE_NAME, "role", "default"), (env::TORCHELASTIC_RUN_ID, "rdzv-id", "none")];
    let set: Vec<(&str, String)> = variables
        .into_iter()
        .filter_map(|(name, option, default)| {
            let value = given.take_last_value(option).filter(|value| value != default)?;
            Some((name, value))
        })
        .collect();
    Ok(build_env_command(command, context, &[], &set))
}

/// Replaces torchrun's macro `$$` in an argument of the user's script by `$`, and splits the
/// argument at each macro `${local_rank}`, whose value differs between workers. Python's
/// `string.Template` has the same rules.
fn split_at_local_rank(argument: &str) -> Vec<String> {
    let (mut parts, mut text) = (Vec::new(), String::new());
    let mut rest = argument;
    while let Some(at) = rest.find('$') {
        text.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let plain = rest
            .strip_prefix("local_rank")
            .filter(|after| !after.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_'));
        if let Some(after) = rest.strip_prefix('$') {
            text.push('$');
            rest = after;
        } else if let Some(after) = rest.strip_prefix("{local_rank}").or(plain) {
            parts.push(std::mem::take(&mut text));
            rest = after;
        } else {
            text.push('$');
        }
    }
    text.push_str(rest);
    parts.push(text);
    parts
}

/// Builds a command that replaces a shell by the command `words`. The local rank of the worker is
/// inserted between the parts of each word.
fn build_shell_command(words: &[Vec<String>]) -> Vec<String> {
    let quote = |text: &String| format!("'{}'", text.replace('\'', r"'\''"));
    let value = format!("\"${}\"", env::LOCAL_RANK);
    let words = words.iter().map(|parts| parts.iter().map(quote).collect::<Vec<_>>().join(&value));
    let text = format!("exec {}", words.collect::<Vec<_>>().join(" "));
    vec!["sh".to_owned(), "-c".to_owned(), text]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_split_at_the_local_rank() {
        for (argument, expected) in [
            ("x", &["x"][..]),
            ("", &[""]),
            ("${local_rank}", &["", ""]),
            ("a$local_rank.log", &["a", ".log"]),
            ("$local_rank$$local_rank${local_rank}", &["", "$local_rank", ""]),
            ("$local_ranks ${local_rank $x $", &["$local_ranks ${local_rank $x $"]),
        ] {
            assert_eq!(split_at_local_rank(argument), expected, "{argument}");
        }
    }

    #[test]
    fn a_shell_inserts_the_local_rank() {
        let words = [vec!["printf".to_owned()], vec!["%s|".to_owned()]];
        let arguments = ["it's $HOME \\ \n`x`".to_owned(), "log.".to_owned(), String::new()];
        let [first, second, third] = arguments.clone();
        let command = build_shell_command(&[&words[..], &[vec![first], vec![second, third]]].concat());
        let mut shell = std::process::Command::new(&command[0]);
        let output = shell.args(&command[1..]).env(env::LOCAL_RANK, "3").output().expect("a shell");
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}|log.3|", arguments[0]));
    }
}
