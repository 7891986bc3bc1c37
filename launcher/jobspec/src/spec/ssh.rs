//! `cluster.ssh`: the settings of SSH connections.
use super::host_values::{one_host_type, user_name_type};
use crate::keys::{
    choice::{choice_type, choices},
    key::Key,
    numbers::integer_type,
    section::section,
    text::path_type,
    units::duration_range_type,
    value_type::{ValueType, in_variant},
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

section! {
    /// The settings of SSH connections. Values that are absent come from the SSH configuration.
    #[derive(Eq)]
    pub struct SshSpec at "cluster.ssh";
    /// The login name of hosts without `user@`.
    pub user: Option<String> = Key::optional(user_name_type(), "from the SSH configuration, else the current user");
    /// The port of hosts without `:port`.
    pub port: Option<u16> = Key::optional(integer_type(1..=65535), "from the SSH configuration, else 22");
    /// The private key; a key with a passphrase must be loaded into `ssh-agent`.
    ///
    /// If this value is `None`, the keys of the SSH configuration, of the SSH agent and the default
    /// keys are used.
    pub key: Option<PathBuf> =
        Key::optional(path_type(), "from the SSH configuration, then `ssh-agent`, then the default keys");
    /// The SSH configuration to read.
    pub config: SshConfig = Key::new(ssh_config_type(), "default").with_deprecated_values(&[("usual", "default")]);
    /// The client that connects to the hosts.
    #[serde(default)]
    pub client: SshClient = Key::new(choice_type(), "auto");
    /// The verification of host keys.
    pub known_hosts: Option<KnownHosts> =
        Key::optional(choice_type(), "from the SSH configuration, else `strict`");
    /// The host through which launch connects to the others.
    pub jump: Option<String> = Key::optional(one_host_type(), "from the SSH configuration, else none");
    /// The limit of each step of connecting to a host; at most `10m`.
    pub connect_timeout_ms: u64 =
        Key::new(duration_range_type(1..=MAX_CONNECT_TIMEOUT_MS, "a duration above 0 of at most `10m`"), "10s");
    /// The number of connections that are set up at the same time.
    ///
    /// On more hosts, the controller is connected with this number of agents, and each agent passes
    /// on the connections of up to this number of others.
    #[serde(rename = "parallel")]
    pub fanout: u32 = Key::new(integer_type(1..=1024), "64").with_deprecated_name("parallel");
}

/// The longest `cluster.ssh.connect_timeout`, in milliseconds.
const MAX_CONNECT_TIMEOUT_MS: u64 = 10 * 60 * 1000;

/// `cluster.ssh.config`: the SSH configuration that is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SshConfig {
    /// The configuration files of the user and of the system.
    #[serde(rename = "Usual")]
    Default,
    /// No configuration file.
    None,
    /// Only the configuration file at this path.
    File(PathBuf),
}

/// Returns the parser and printer ([`ValueType`]) for `cluster.ssh.config`: `default`, `none`, or
/// the path of an SSH configuration file.
fn ssh_config_type() -> ValueType<SshConfig> {
    in_variant!(path_type(), SshConfig::File)
        .or_keywords(&[("default", SshConfig::Default), ("none", SshConfig::None)])
}

choices! {
    /// `cluster.ssh.client`: the program that connects to the hosts over SSH.
    #[derive(Default)]
    pub enum SshClient {
        /// The built-in client, or OpenSSH's client for hosts whose configuration requires it.
        Auto = "auto" is default,
        /// The built-in client. A configuration that it cannot follow is an error.
        Builtin = "builtin",
        /// OpenSSH's client, which is the program `ssh` of this machine.
        OpenSsh = "openssh",
    }
}

choices! {
    /// `cluster.ssh.known_hosts`: which host keys an SSH connection accepts.
    pub enum KnownHosts {
        /// Only keys that known_hosts contains.
        Strict = "strict",
        /// Keys that known_hosts contains, and the key of a host without an entry in known_hosts.
        /// The new key is then added to known_hosts.
        AcceptNew = "accept_new",
    }
}
