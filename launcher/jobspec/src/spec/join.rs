//! `cluster.join`: how hosts on which the user starts launch form one job.
use crate::{
    hosts::RendezvousAddress,
    keys::{
        key::Key,
        key_info::{Condition, Rule},
        numbers::{boolean_type, integer_type},
        section::{default_section, field_without_key, section},
        text::{formatted_text_type, path_type},
        units::duration_range_type,
        value_type::ValueType,
    },
};
use std::path::PathBuf;

section! {
    /// How the hosts of a job with `hosts: join` find each other.
    #[derive(Eq)]
    pub struct JoinSpec at "cluster.join", rules JOIN_RULES;
    /// The number of nodes, including node 0; the user starts launch once on each node.
    pub nodes: Option<u32> = Key::optional(integer_type(1..=16_384), "from `--nodes` or the environment");
    /// The address of node 0, to which the other nodes connect; the default port is 29400.
    pub rendezvous: Option<String> = Key::optional(rendezvous_type(), "from `--rendezvous` or the environment");
    /// The file with the secret key of all nodes, of 32 bytes or more.
    pub key_file: Option<PathBuf> = Key::optional(path_type(), "from `--key-file` or `LAUNCH_KEY_FILE`");
    /// Let every process that reaches node 0 join, without a key.
    pub insecure: bool = Key::new(boolean_type(), "false");
    /// How long node 0 waits for the other nodes, and the other nodes wait for node 0.
    pub timeout_ms: u64 = Key::new(duration_range_type(1000..=MAX_TIMEOUT_MS, "a duration from `1s` to `7d`"), "10m");
    /// How long node 0 waits for more nodes once `run.min_hosts` nodes have joined.
    pub last_call_ms: u64 = Key::new(duration_range_type(0..=MAX_TIMEOUT_MS, "a duration of at most `7d`"), "30s");
    /// Whether the nodes only check their hosts (`launch check`) and start no workers.
    pub checks_hosts: bool = field_without_key();
}

/// The rule that warns that keys of `cluster.join` have no effect in jobs whose hosts are
/// local, or come from Slurm, PBS or LSF.
const JOIN_RULES: &[Rule] =
    &[Rule::no_effect(&[Condition::OneOf("cluster.hosts", &["local", "slurm", "pbs", "lsf"])])
        .into_warning()];
/// The longest time that a job may wait for other nodes to join, in milliseconds.
const MAX_TIMEOUT_MS: u64 = 7 * 86_400_000;

impl Default for JoinSpec {
    /// Returns the values that `cluster.join` has if a job does not contain the section.
    fn default() -> Self {
        default_section()
    }
}

impl JoinSpec {
    /// Returns whether a key of the section `cluster.join` differs from its default.
    pub(crate) fn differs_from_default(&self) -> bool {
        *self != JoinSpec::default()
    }
}

/// Returns the parser and printer ([`ValueType`]) for `cluster.join.rendezvous`: the address at
/// which node 0 listens for the other nodes, such as `host:29400`.
fn rendezvous_type() -> ValueType<String> {
    formatted_text_type(
        "text: `HOST[:PORT]`",
        "an address such as `node-0.example.org:29400`",
        "^\\S+$",
        |text| text.parse::<RendezvousAddress>().is_ok(),
    )
}
