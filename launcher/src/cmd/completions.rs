//! `launch completions`: prints the completion script of a shell.
use super::{context::CommandContext, output::print_text};
use clap::Args;
use clap_complete::Shell;

/// Arguments of `launch completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell that reads the script
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// Runs `launch completions`: prints a script that completes the commands and options of `launch`.
pub(crate) fn run(args: CompletionsArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut (context.build_definition)(), "launch", &mut script);
    print_text(&String::from_utf8_lossy(&script))
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;
    use clap::{CommandFactory, ValueEnum};
    use clap_complete::Shell;
    use std::process::Command;

    /// Generates the script that completes the command line of `launch` in the shell `shell`.
    fn render_script(shell: Shell) -> String {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "launch", &mut script);
        String::from_utf8(script).expect("UTF-8")
    }

    #[test]
    fn every_script_completes_every_command() {
        for shell in Shell::value_variants() {
            let script = render_script(*shell);
            for command in Cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
        }
    }

    #[test]
    fn bash_completes_subcommands_and_options() {
        let complete = |words: &str| {
            let script = format!(
                "{}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n\
                 _launch launch \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; echo \"${{COMPREPLY[@]}}\"",
                render_script(Shell::Bash)
            );
            let output = Command::new("bash").args(["-c", &script]).output().expect("bash runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        };
        assert_eq!(complete("launch ckpt con"), "convert");
        assert_eq!(complete("launch ckpt convert --to sa"), "safetensors");
        assert_eq!(complete("launch run --dry"), "--dry-run");
        assert_eq!(complete("launch completions fi"), "fish");
    }
}
