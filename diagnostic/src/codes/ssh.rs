//! The diagnostic codes (names with explanations) of errors about SSH: configuration, connection,
//! host keys and login.

codes! {
    // --- configuration -------------------------------------------------------------------------
    SSH_CONFIG_UNREADABLE: Cluster = "ssh-config-unreadable" {
        summary: "An SSH configuration file could not be read.",
        cause: "The file does not exist, is not readable by this user, or is larger than 1 MiB.",
        remedy: "Correct `cluster.ssh.config`, or set it to `none` to read no configuration.",
    }
    SSH_CONFIG_INVALID: Cluster = "ssh-config-invalid" {
        summary: "An SSH configuration file contains a mistake.",
        cause: "A quote is not closed, a keyword has no value, or `Include` is nested too deeply.",
        remedy: "Correct the line that is named, or set `cluster.ssh.config` to another file.",
    }
    SSH_CONFIG_UNSUPPORTED: Cluster = "ssh-config-unsupported" {
        summary: "launch needs OpenSSH's client to evaluate the SSH configuration, and the client failed.",
        cause: "The configuration uses `Match` or the canonicalization of host names, which launch evaluates with `ssh -G`. The client is missing, or it rejects the configuration.",
        remedy: "Install OpenSSH's client on this machine, or set `cluster.ssh.config` to another file.",
    }
    SSH_CONFIG_TOKEN_UNKNOWN: Cluster = "ssh-config-token-unknown" {
        summary: "A path in the SSH configuration contains an unsupported token or variable.",
        cause: "launch expands `%%`, `%d`, `%h`, `%n`, `%p`, `%r` and `%u` in paths, and no variables.",
        remedy: "Set `cluster.ssh.key`, or set `cluster.ssh.config` to another file.",
    }
    SSH_PROXY_UNSUPPORTED: Cluster = "ssh-proxy-unsupported" {
        summary: "The SSH configuration reaches a host through `ProxyCommand`, and `cluster.ssh.client` is `builtin`.",
        cause: "The built-in client connects to a host directly or through jump hosts. Only OpenSSH's client runs proxy commands.",
        remedy: "Set `cluster.ssh.client` to `auto` or `openssh`. If the command only passes through another host, use `ProxyJump` or `cluster.ssh.jump`.",
    }
    SSH_OPTION_UNSUPPORTED: Cluster = "ssh-option-unsupported" {
        summary: "The SSH configuration of a host requires OpenSSH's client, and `cluster.ssh.client` is `builtin`.",
        cause: "The configuration, or a file that it selects, requires something that only OpenSSH's client supports, such as certificates, hardware keys, Kerberos or `ControlPath`. The message names it.",
        remedy: "Set `cluster.ssh.client` to `auto` or `openssh`, or set `cluster.ssh.config` to another file.",
    }
    SSH_JUMP_INVALID: Cluster = "ssh-jump-invalid" {
        summary: "The list of jump hosts is not valid.",
        cause: "An entry is not of the form `USER@HOST:PORT`, or there are more than 4 jump hosts.",
        remedy: "Correct `cluster.ssh.jump`, or `ProxyJump` in the SSH configuration.",
    }

    // --- OpenSSH's client ----------------------------------------------------------------------
    SSH_CLIENT_MISSING: Cluster = "ssh-client-missing" {
        summary: "The program `ssh` cannot be started.",
        cause: "`cluster.ssh.client` or the SSH configuration requires OpenSSH's client, which is not in the `PATH` of launch.",
        remedy: "Install OpenSSH's client on this machine, or set `cluster.ssh.client` to `builtin`.",
    }
    SSH_CLIENT_FAILED: Cluster = "ssh-client-failed" {
        summary: "The program `ssh` ended before it was logged in to a host.",
        cause: "The program is not OpenSSH's client, it was killed, or it failed for the reason that it has printed.",
        remedy: "Run the `ssh` command that the message names, and check which program `command -v ssh` finds.",
    }
    SSH_CLIENT_TIMEOUT: Cluster = "ssh-client-timeout" {
        summary: "The program `ssh` did not log in to a host in time.",
        cause: "The limit is twice `cluster.ssh.connect_timeout`, plus the same time for each jump host. The proxy command, a Kerberos server, a hardware key or the host does not answer.",
        remedy: "Run the `ssh` command that the message names, or raise `cluster.ssh.connect_timeout`.",
    }
    SSH_PROXY_FAILED: Cluster = "ssh-proxy-failed" {
        summary: "The jump host or the proxy command of a host did not reach the host.",
        cause: "The proxy command failed, or a jump host rejected the login or does not reach the host. The message contains what they printed.",
        remedy: "Run the `ssh` command that the message names, and check `ProxyCommand`, `ProxyJump` and `cluster.ssh.jump`.",
    }

    // --- connecting ----------------------------------------------------------------------------
    SSH_NAME_UNRESOLVED: Cluster = "ssh-name-unresolved" {
        summary: "The name of a host has no address.",
        cause: "The name is misspelled, or DNS and `/etc/hosts` of this machine do not know it.",
        remedy: "Check the name with `getent hosts NAME`, or use an address in the list of hosts.",
    }
    SSH_CONNECT_REFUSED: Cluster = "ssh-connect-refused" {
        summary: "A host rejected the TCP connection to its SSH port.",
        cause: "The host is up, but no SSH server listens on the port.",
        remedy: "Check that sshd runs on the host and that the port is right (`cluster.ssh.port`).",
    }
    SSH_CONNECT_TIMEOUT: Cluster = "ssh-connect-timeout" {
        summary: "A host did not answer the TCP connection to its SSH port in time.",
        cause: "The host is down, or a firewall drops the packets.",
        remedy: "Check that the host is up and that the port is reachable. `cluster.ssh.connect_timeout` sets the limit.",
    }
    SSH_NO_ROUTE: Cluster = "ssh-no-route" {
        summary: "There is no route to a host.",
        cause: "The host is down, or it is in a network that this machine does not reach.",
        remedy: "Check the host and the routes of this machine, or use a jump host (`cluster.ssh.jump`).",
    }
    SSH_CONNECT_FAILED: Cluster = "ssh-connect-failed" {
        summary: "The TCP connection to a host's SSH port failed.",
        cause: "The message contains the reason that the operating system reported.",
        remedy: "Try `ssh HOST` from this machine.",
    }
    SSH_JUMP_FAILED: Cluster = "ssh-jump-failed" {
        summary: "A jump host could not connect to the next host.",
        cause: "The jump host does not reach the next host, or its sshd does not allow TCP forwarding (`AllowTcpForwarding`).",
        remedy: "Try `ssh -J JUMP HOST`, and check sshd_config of the jump host.",
    }
    SSH_HANDSHAKE_FAILED: Cluster = "ssh-handshake-failed" {
        summary: "A host accepted the connection, but the SSH handshake failed.",
        cause: "The port does not belong to an SSH server, the server has too many connections that are not logged in (`MaxStartups`), or it offers no common algorithm.",
        remedy: "Try `ssh HOST`. For many hosts behind one server lower `cluster.ssh.fanout`, or raise `MaxStartups` in sshd_config.",
    }
    SSH_HANDSHAKE_TIMEOUT: Cluster = "ssh-handshake-timeout" {
        summary: "A host accepted the connection, but sent no SSH banner in time.",
        cause: "The port does not belong to an SSH server, or the host is overloaded.",
        remedy: "Check the port and the load of the host. `cluster.ssh.connect_timeout` sets the limit.",
    }
    SSH_SESSION_LIMIT: Cluster = "ssh-session-limit" {
        summary: "This machine has no resources left for another SSH connection.",
        cause: "The limit of open files, processes or threads is reached.",
        remedy: "Raise the limits (`ulimit -n`, `ulimit -u`), or lower `cluster.ssh.fanout`.",
    }
    SSH_CONNECTION_ABORTED: Cluster = "ssh-connection-aborted" {
        summary: "The controller closed the connection to a host before the agent was running.",
        cause: "The host took longer than the controller waits, or the job was stopped.",
        remedy: "Read the earlier message about the host.",
    }
    SSH_CONNECTION_LOST: Cluster = "ssh-connection-lost" {
        summary: "The SSH connection to a host was lost.",
        cause: "The host went down, or the network to it failed.",
        remedy: "Check that the host is up and reachable.",
    }

    // --- host keys -----------------------------------------------------------------------------
    SSH_HOST_KEY_UNKNOWN: Cluster = "ssh-host-key-unknown" {
        summary: "The SSH key of a host is not in known_hosts.",
        cause: "This account has never connected to the host, or the host was reinstalled.",
        remedy: "Run `ssh HOST` once and compare the fingerprint, or set `cluster.ssh.known_hosts: accept_new`.",
    }
    SSH_HOST_KEY_CHANGED: Cluster = "ssh-host-key-changed" {
        summary: "A host presents another SSH key than the one in known_hosts.",
        cause: "The host was reinstalled, or another machine answers in its place.",
        remedy: "Find out which of the two causes applies. If the host was reinstalled, remove the old key with `ssh-keygen -R HOST`.",
    }
    SSH_HOST_KEY_TYPE_UNKNOWN: Cluster = "ssh-host-key-type-unknown" {
        summary: "known_hosts has keys of a host, but no key of the type that the host presents.",
        cause: "The host's keys were replaced, or known_hosts was written by a client that prefers another type.",
        remedy: "Compare the fingerprint, then add the key, or remove the old ones with `ssh-keygen -R HOST`.",
    }
    SSH_HOST_KEY_REVOKED: Cluster = "ssh-host-key-revoked" {
        summary: "The SSH key of a host is marked as revoked in known_hosts.",
        cause: "The key was exposed. Another machine may answer with it.",
        remedy: "Give the host a new key.",
    }
    SSH_KNOWN_HOSTS_UNREADABLE: Cluster = "ssh-known-hosts-unreadable" {
        summary: "A known_hosts file could not be read.",
        cause: "The file is not readable by this user, or larger than 64 MiB.",
        remedy: "Correct the permissions of the file, or name another one with `UserKnownHostsFile`.",
    }
    SSH_KNOWN_HOSTS_UNWRITABLE: Cluster = "ssh-known-hosts-unwritable" {
        summary: "The new key of a host could not be added to known_hosts.",
        cause: "`cluster.ssh.known_hosts: accept_new` stores new keys, and the file or its directory is not writable.",
        remedy: "Make the file writable, or add the key yourself and set `cluster.ssh.known_hosts: strict`.",
    }

    // --- login ---------------------------------------------------------------------------------
    SSH_LOGIN_FAILED: Cluster = "ssh-login-failed" {
        summary: "A host rejected every SSH key of this user.",
        cause: "The user has no key on the host, or the wrong user or key is configured.",
        remedy: "Make `ssh USER@HOST` work without a password, for example with `ssh-copy-id`. `cluster.ssh.user` and `cluster.ssh.key` select the user and the key.",
    }
    SSH_KEY_LOCKED: Cluster = "ssh-key-locked" {
        summary: "The login failed, and a key was skipped because it has a passphrase.",
        cause: "launch does not ask for passphrases.",
        remedy: "Add the key to the SSH agent with `ssh-add FILE` before the start.",
    }
    SSH_PUBLICKEY_UNSUPPORTED: Cluster = "ssh-publickey-unsupported" {
        summary: "A host does not accept public keys.",
        cause: "The sshd of the host allows only other methods, such as passwords. The built-in client logs in with keys only.",
        remedy: "Enable `PubkeyAuthentication` in sshd_config of the host, or set `cluster.ssh.client: openssh` for Kerberos and host-based logins.",
    }
    SSH_COMMAND_REJECTED: Cluster = "ssh-command-rejected" {
        summary: "A host accepted the login, but runs no commands.",
        cause: "`ForceCommand`, a restricted key or `MaxSessions` does not allow it.",
        remedy: "Let this user run commands over SSH: `ssh HOST true` must succeed.",
    }
    SSH_SHELL_TIMEOUT: Cluster = "ssh-shell-timeout" {
        summary: "A host did not run a command of launch within its time limit, such as 30 s.",
        cause: "The start-up files of the login shell wait for input, or for a file system that does not \
                answer; or the host takes too long to check its copy of the executable.",
        remedy: "Try `ssh HOST true`, and look at the start-up files of the login shell and at the load of \
                 the host.",
    }
    SSH_SHELL_OUTPUT_TOO_LONG: Cluster = "ssh-shell-output-too-long" {
        summary: "The login shell of a host printed more than 256 KiB before it ran a command.",
        cause: "The start-up files of the shell print without end when there is no terminal.",
        remedy: "Let the start-up files print nothing in shells that are not interactive.",
    }
    SSH_SHELL_EXITED: Cluster = "ssh-shell-exited" {
        summary: "The login shell of a host ended before it ran a command.",
        cause: "The login shell is `nologin`, or its start-up files end shells that are not interactive.",
        remedy: "Try `ssh HOST true`, and look at the start-up files of the login shell.",
    }
    SSH_ANSWER_INVALID: Cluster = "ssh-answer-invalid" {
        summary: "A host answered a command of launch with unexpected output.",
        cause: "A wrapper around the shell changes the output, or another version of launch answered.",
        remedy: "Try `ssh HOST true`; it must print nothing.",
    }
}
