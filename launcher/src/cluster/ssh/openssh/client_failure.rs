//! [`ClientFailure`]: why OpenSSH's client could not connect to a host, or lost the connection.
use super::client_log::ClientLogParser;
use crate::cluster::{
    ssh::{ssh_error::build_ssh_error, target::SshTarget},
    transport::ConnectionStage,
};
use diagnostic::{Code, Diagnostic, codes::ssh};
use protocol::control::ExitStatus;
use std::{io, time::Duration};

/// The exit code of OpenSSH's client (`ssh`) for an error of the client itself, after which the
/// exit code of the remote command is unknown.
const CLIENT_ERROR_EXIT_CODE: u8 = 255;
/// The number of last lines of the stderr of OpenSSH's client, and of last messages of its log,
/// that an error message of launch quotes.
const MAX_OUTPUT_LINES: usize = 3;

/// Texts from error messages of OpenSSH's client, each with the error code and the connection stage
/// of the failure that it indicates. The first entry with a matching text applies.
///
/// The texts only select among failures. That the client has failed is known from its exit code.
const FAILURE_PATTERNS: &[(&[&str], Code, ConnectionStage)] = &[
    (
        &["Bad configuration option", "bad configuration options", "Bad owner or permissions on"],
        ssh::SSH_CONFIG_INVALID,
        ConnectionStage::Config,
    ),
    (&["Could not resolve hostname"], ssh::SSH_NAME_UNRESOLVED, ConnectionStage::Name),
    (
        &["REVOKED HOST KEY", "was revoked and you have requested strict"],
        ssh::SSH_HOST_KEY_REVOKED,
        ConnectionStage::HostKey,
    ),
    (
        &["REMOTE HOST IDENTIFICATION HAS CHANGED", "has changed and you have requested strict"],
        ssh::SSH_HOST_KEY_CHANGED,
        ConnectionStage::HostKey,
    ),
    (
        &["Host key verification failed", "host key is known for"],
        ssh::SSH_HOST_KEY_UNKNOWN,
        ConnectionStage::HostKey,
    ),
    (
        &["Permission denied (", "Too many authentication failures", "No more authentication methods"],
        ssh::SSH_LOGIN_FAILED,
        ConnectionStage::Authentication,
    ),
    (
        &["Unable to negotiate with", "no matching host key type", "no matching key exchange"],
        ssh::SSH_HANDSHAKE_FAILED,
        ConnectionStage::HostKey,
    ),
    (&["during banner exchange"], ssh::SSH_HANDSHAKE_TIMEOUT, ConnectionStage::HostKey),
    (&["Connection refused"], ssh::SSH_CONNECT_REFUSED, ConnectionStage::Tcp),
    (&["Connection timed out", "Operation timed out"], ssh::SSH_CONNECT_TIMEOUT, ConnectionStage::Tcp),
    (&["No route to host", "Network is unreachable"], ssh::SSH_NO_ROUTE, ConnectionStage::Tcp),
    (&["ssh: connect to host"], ssh::SSH_CONNECT_FAILED, ConnectionStage::Tcp),
    (&SERVER_CLOSED_MESSAGES, ssh::SSH_HANDSHAKE_FAILED, ConnectionStage::HostKey),
];

/// The texts with which OpenSSH's client reports that the server has closed the connection during
/// the handshake.
const SERVER_CLOSED_MESSAGES: [&str; 4] =
    ["kex_exchange_identification", "Connection closed by", "Connection reset by", "banner line"];

/// The reason why OpenSSH's client could not connect to a host or lost the connection, with the
/// lines that the client has printed.
#[derive(Debug)]
pub(in crate::cluster::ssh) struct ClientFailure {
    code: Code,
    pub(in crate::cluster::ssh) stage: ConnectionStage,
    message: String,
    /// The lines of the client and of its proxy command that explain the failure.
    output: Vec<String>,
    host_key: Option<(String, String)>,
    /// Whether the server closed the connection during the handshake, as servers with too many
    /// connections do.
    pub(in crate::cluster::ssh) is_closed_by_server: bool,
}

impl ClientFailure {
    /// Determines why OpenSSH's client has failed, or returns `None` if the client has not failed
    /// and only the remote command has ended. `stderr` is what the remote command and the proxy
    /// command wrote.
    pub(super) fn from_client_end(
        status: Option<ExitStatus>,
        log: &ClientLogParser,
        stderr: &[u8],
        target: &SshTarget,
    ) -> Option<ClientFailure> {
        let (is_client_error, ending) = match status {
            Some(ExitStatus::Code(code)) => {
                (code == CLIENT_ERROR_EXIT_CODE, format!("ended with exit code {code}"))
            }
            Some(ExitStatus::Signal(signal, _)) => (true, format!("was killed by signal {signal}")),
            None => (true, "closed its output".to_owned()),
        };
        if log.is_logged_in && (!is_client_error || log.has_exit_code || log.has_exit_signal) {
            return None;
        }
        let output = select_error_lines(log, stderr);
        let name = &target.name;
        if log.is_logged_in {
            let message = format!("the SSH connection to host {name} was lost: `ssh` {ending}");
            return Some(Self::new(ssh::SSH_CONNECTION_LOST, ConnectionStage::Agent, message, output, log));
        }
        let is_exit_255 = status == Some(ExitStatus::Code(CLIENT_ERROR_EXIT_CODE));
        let has = |texts: &[&str]| is_exit_255 && log.messages().any(|m| texts.iter().any(|t| m.contains(t)));
        let cause = FAILURE_PATTERNS.iter().find(|(texts, ..)| has(texts));
        let is_closed = cause.is_some_and(|(texts, ..)| *texts == SERVER_CLOSED_MESSAGES.as_slice());
        let has_proxy = target.openssh_proxy().is_some();
        let (code, stage) = match cause {
            // The key exchange has ended, so the login failed.
            Some(_) if is_closed && log.host_key.is_some() => {
                (ssh::SSH_CLIENT_FAILED, ConnectionStage::Authentication)
            }
            Some(_) if is_closed && has_proxy => (ssh::SSH_PROXY_FAILED, ConnectionStage::Tcp),
            Some((_, code, stage)) => (*code, *stage),
            None => (ssh::SSH_CLIENT_FAILED, ConnectionStage::Authentication),
        };
        let message = format!("cannot connect to host {name} with `ssh`, which {ending}");
        let mut failure = Self::new(code, stage, message, output, log);
        failure.is_closed_by_server = is_closed && !has_proxy && log.host_key.is_none();
        Some(failure)
    }

    /// Creates the description of a login timeout: OpenSSH's client has not logged in to a host
    /// within the time `limit`.
    pub(super) fn from_login_timeout(
        limit: Duration,
        log: &ClientLogParser,
        stderr: &[u8],
        target: &SshTarget,
    ) -> ClientFailure {
        let message =
            format!("`ssh` did not log in to host {} within {} s", target.name, limit.as_secs_f64());
        let output = select_error_lines(log, stderr);
        Self::new(ssh::SSH_CLIENT_TIMEOUT, ConnectionStage::Authentication, message, output, log)
    }

    /// Creates the description of a failure of OpenSSH's client from an error code, the stage in
    /// which the connection failed, and a message.
    fn new(
        code: Code,
        stage: ConnectionStage,
        message: String,
        output: Vec<String>,
        log: &ClientLogParser,
    ) -> ClientFailure {
        let host_key = log.host_key.clone();
        ClientFailure { code, stage, message, output, host_key, is_closed_by_server: false }
    }

    /// Converts the failure of OpenSSH's client into an error for the user about the connection to
    /// the host `target`. The last lines of the client are the cause.
    pub(in crate::cluster::ssh) fn into_diagnostic(self, target: &SshTarget) -> Diagnostic {
        let mut error = build_ssh_error(target, self.code, self.message).with_field("client", "openssh");
        if let Some((key_type, fingerprint)) = self.host_key {
            error = error.with_field("key_type", key_type).with_field("fingerprint", fingerprint);
        }
        if let Some(proxy) = target.openssh_proxy() {
            error = error.with_field("proxy", proxy);
        }
        if !self.output.is_empty() {
            error = error.with_cause(&io::Error::other(self.output.join(" / ")));
        }
        let command = target.format_ssh_command_for_user();
        error
            .with_field("output", self.output)
            .with_field("command", command.as_str())
            .with_help(format!("try `{command} true`"))
            .with_remedy()
    }
}

/// Returns the lines that explain a failure of OpenSSH's client: the last lines of its stderr,
/// followed by the last messages of its log.
fn select_error_lines(log: &ClientLogParser, stderr: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = log.messages().map(str::to_owned).collect();
    let text = String::from_utf8_lossy(stderr);
    let replace = |line: &str| line.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    let others: Vec<String> = text.lines().map(str::trim).filter(|l| !l.is_empty()).map(replace).collect();
    // What a proxy command prints comes before the messages of the client that follow from it.
    let others = &others[others.len().saturating_sub(MAX_OUTPUT_LINES)..];
    let first = lines.len().saturating_sub(MAX_OUTPUT_LINES);
    lines.drain(..first);
    others.iter().cloned().chain(lines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the failure of a client that ended with `status` after it wrote these lines.
    fn explain(log_text: &str, status: Option<ExitStatus>, proxy: &str) -> Option<ClientFailure> {
        let mut log = ClientLogParser::default();
        log.parse_chunk(log_text.as_bytes());
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("config"), proxy).expect("a file");
        let mut spec = crate::testing::sample_job().cluster.ssh;
        spec.config = jobspec::SshConfig::File("config".into());
        spec.client = jobspec::SshClient::OpenSsh;
        let resolver = crate::cluster::ssh::target::TargetResolver::new(&spec, dir.path());
        let host = jobspec::hosts::parse_hosts("h0").expect("a host").remove(0);
        let target = resolver.and_then(|resolver| resolver.resolve_target(&host)).expect("a target");
        ClientFailure::from_client_end(status, &log, b"from the proxy\n", &target)
    }

    #[test]
    fn failures_before_the_login_are_classified() {
        use ConnectionStage::*;
        for (text, code, stage) in [
            ("ssh: Could not resolve hostname h0: Name or service not known", ssh::SSH_NAME_UNRESOLVED, Name),
            ("ssh: connect to host h0 port 22: Connection refused", ssh::SSH_CONNECT_REFUSED, Tcp),
            ("ssh: connect to host h0 port 22: Connection timed out", ssh::SSH_CONNECT_TIMEOUT, Tcp),
            ("ssh: connect to host h0 port 22: No route to host", ssh::SSH_NO_ROUTE, Tcp),
            ("ssh: connect to host h0 port 22: Invalid argument", ssh::SSH_CONNECT_FAILED, Tcp),
            ("Connection timed out during banner exchange", ssh::SSH_HANDSHAKE_TIMEOUT, HostKey),
            (
                "No ED25519 host key is known for h0 and you have requested strict checking.\n\
                 Host key verification failed.",
                ssh::SSH_HOST_KEY_UNKNOWN,
                HostKey,
            ),
            (
                "Host key for h0 has changed and you have requested strict checking.\n\
                 Host key verification failed.",
                ssh::SSH_HOST_KEY_CHANGED,
                HostKey,
            ),
            ("root@h0: Permission denied (publickey).", ssh::SSH_LOGIN_FAILED, Authentication),
            ("command-line: line 0: Bad configuration option: x", ssh::SSH_CONFIG_INVALID, Config),
            ("something else", ssh::SSH_CLIENT_FAILED, Authentication),
        ] {
            let failure = explain(&format!("{text}\n"), Some(ExitStatus::Code(255)), "").expect(text);
            assert_eq!((failure.code, failure.stage), (code, stage), "{text}");
            // Without the exit code of a failed client, the texts mean nothing.
            let other = explain(&format!("{text}\n"), Some(ExitStatus::Code(1)), "").expect(text);
            assert_eq!(other.code, ssh::SSH_CLIENT_FAILED, "{text}");
        }
        let killed = explain("", Some(ExitStatus::Signal(9, false)), "").expect("a failure");
        assert!(killed.code == ssh::SSH_CLIENT_FAILED && killed.message.contains("signal 9"), "{killed:?}");
    }

    #[test]
    fn a_closed_connection_is_tried_again_unless_a_proxy_failed() {
        let text = "kex_exchange_identification: Connection closed by remote host\n";
        let failure = explain(text, Some(ExitStatus::Code(255)), "").expect("a failure");
        assert!(failure.is_closed_by_server && failure.code == ssh::SSH_HANDSHAKE_FAILED, "{failure:?}");
        let later = format!("debug1: Server host key: ssh-ed25519 SHA256:x\n{text}");
        let failure = explain(&later, Some(ExitStatus::Code(255)), "").expect("a failure");
        assert!(!failure.is_closed_by_server && failure.stage == ConnectionStage::Authentication);
        let proxy = "Host h0\nProxyCommand nc %h %p\n";
        let failure = explain(text, Some(ExitStatus::Code(255)), proxy).expect("a failure");
        assert!(!failure.is_closed_by_server && failure.code == ssh::SSH_PROXY_FAILED, "{failure:?}");
        assert_eq!(failure.output[0], "from the proxy");
    }

    #[test]
    fn the_end_of_the_remote_command_is_no_failure() {
        let login = "Authenticated to h0 ([10.0.0.1]:22).\n";
        assert!(explain(login, Some(ExitStatus::Code(3)), "").is_none());
        let status = "debug1: client_input_channel_req: channel 0 rtype exit-status reply 0\n";
        assert!(explain(&format!("{login}{status}"), Some(ExitStatus::Code(255)), "").is_none());
        let signal = "debug1: client_input_channel_req: channel 0 rtype exit-signal reply 0\n";
        assert!(explain(&format!("{login}{signal}"), Some(ExitStatus::Code(255)), "").is_none());
        for status in [Some(ExitStatus::Code(255)), Some(ExitStatus::Signal(9, false)), None] {
            let failure = explain(login, status, "").expect("a lost connection");
            assert_eq!(failure.code, ssh::SSH_CONNECTION_LOST);
        }
    }
}
