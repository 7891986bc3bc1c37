//! `launch man`: prints or writes the man pages.
use super::{
    context::CommandContext,
    output::{output_error, path_error, print_text},
};
use clap::Args;
use clap_mangen::Man;
use diagnostic::codes::command;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Arguments of `launch man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory to which the page of each command is written; created if it does not exist
    /// [default: print the page of `launch`]
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Runs `launch man`: writes the man pages of all public commands to a directory or, without a
/// directory, prints the page of `launch`.
pub(crate) fn run(args: ManArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let definition = (context.build_definition)();
    let Some(dir) = args.dir else {
        let mut page = Vec::new();
        Man::new(definition).render(&mut page).map_err(|error| output_error(&error))?;
        return print_text(&String::from_utf8_lossy(&page));
    };
    write_pages(definition, &dir)
        .map_err(|error| path_error(command::OUTPUT_FAILED, "cannot write man pages to", &dir, &error))?;
    Ok(protocol::exit::DONE)
}

/// Writes the man pages `launch.1`, `launch-run.1` and so on to `dir`. Creates `dir` if it does not
/// exist, and replaces existing pages.
fn write_pages(definition: clap::Command, dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    clap_mangen::generate_to(definition, dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    #[test]
    fn every_public_command_has_a_page() {
        let dir = tempfile::tempdir().expect("a directory");
        let pages = dir.path().join("share/man1");
        for _ in 0..2 {
            write_pages(Cli::command(), &pages).expect("written");
        }
        let page = |name: &str| fs::read_to_string(pages.join(format!("{name}.1")));
        assert!(page("launch").expect("a page").contains("Exit codes"));
        assert!(page("launch-ckpt-convert").expect("a page").contains("safetensors"));
        for command in Cli::command().get_subcommands() {
            let is_written = page(&format!("launch-{}", command.get_name())).is_ok();
            assert_eq!(is_written, !command.is_hide_set(), "{}", command.get_name());
        }
    }
}
