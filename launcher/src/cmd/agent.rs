//! `launch agent`: runs the agent, the process that the controller of a run starts on each host to
//! start and watch the workers there.
use super::context::CommandContext;
use crate::{agent, executable};
use clap::Args;

/// Arguments of the internal command `launch agent`.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Text that the agent prints first, on a separate line; the controller ignores output before
    /// it
    #[arg(long, value_name = "TEXT")]
    marker: Option<String>,
    /// Print the content hash of this executable once it is on disk, and exit
    #[arg(long)]
    own_hash: bool,
    /// Read the agent's place in the tree of agents from stdin
    #[arg(long)]
    tree: bool,
    /// Read an invitation from stdin and connect to the controller
    #[arg(long)]
    join: bool,
    /// Remove the executable of this agent, which is a temporary copy
    #[arg(long)]
    remove_own_file: bool,
}

/// Runs `launch agent`: runs this host's agent (the process that starts and watches the workers)
/// or, with `--own-hash`, prints the content hash of the executable. Returns the exit code.
pub(crate) fn run(args: AgentArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    if args.own_hash {
        return Ok(executable::sync_and_print_executable_hash());
    }
    Ok(agent::main(agent::AgentOptions {
        marker: args.marker,
        join: args.join,
        tree: args.tree,
        remove_executable: args.remove_own_file,
        preflight: context.preflight,
    }))
}
