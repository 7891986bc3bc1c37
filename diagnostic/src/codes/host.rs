//! Codes of errors about hosts, SSH, Slurm and control connections.

codes! {
    SSH_HOST_KEY_UNKNOWN: Cluster = "ssh-host-key-unknown" {
        summary: "The SSH key of a host is not in known_hosts.",
        cause: "Nobody has connected to the host from this account yet, or the host was reinstalled.",
        remedy: "Run `ssh HOST` once and compare the fingerprint, or set `cluster.ssh.known_hosts: accept_new`.",
    }
}
