//! [`find_lost_connection`]: determines from the exception that ended a program whether the reason
//! was that torch lost a connection to another rank.
use protocol::failure::LostConnection;

/// The texts that identify exceptions of one torch component (Gloo, NCCL or TCPStore), and the
/// texts that identify a lost connection in their messages.
struct ExceptionRule {
    connection: LostConnection,
    /// The exception belongs to the part of torch if its line contains one of these texts.
    origins: &'static [&'static str],
    /// The exception reports a lost connection if it contains one of these texts.
    losses: &'static [&'static str],
    /// How many lines after the first one belong to the message of the exception.
    detail_lines: usize,
}

/// The texts that identify exceptions about lost connections, for each of the torch components
/// Gloo, NCCL and TCPStore.
const RULES: [ExceptionRule; 3] = [
    ExceptionRule {
        connection: LostConnection::Gloo,
        origins: &["/gloo/gloo/transport/"],
        losses: &[
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "Connection refused",
        ],
        detail_lines: 0,
    },
    ExceptionRule {
        connection: LostConnection::Nccl,
        origins: &["NCCL error", "NCCL Error"],
        losses: &[
            "remote process exited",
            "ncclRemoteError",
            "Connection closed by remote peer",
            "Connection reset by peer",
            "Broken pipe",
            "Connection refused",
        ],
        detail_lines: 4,
    },
    ExceptionRule {
        connection: LostConnection::TcpStore,
        origins: &["DistNetworkError"],
        losses: &["Connection was likely closed", "Connection reset by peer", "Broken pipe"],
        detail_lines: 0,
    },
];

/// The lines that Python prints between two exceptions if the second one was raised while the first
/// one was handled.
const CHAIN_LINES: [&str; 2] = [
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
];

/// The endings of exception type names, such as `Error`, by which a line in a program's output is
/// recognized as the report of a Python exception. Other lines are not those of an exception.
const TYPE_ENDINGS: [&str; 4] = ["Error", "Exception", "Interrupt", "Exit"];

/// Returns which torch component (Gloo, NCCL or TCPStore) lost a connection and thereby ended the
/// program; `None` if the program ended for another reason.
///
/// `error` is the exception that the program has recorded. Without it, the last exception in
/// `tail`, the last lines of the output, counts. Of a chain of exceptions, the first one counts,
/// because the later ones follow from it.
pub(super) fn find_lost_connection(tail: &[String], error: Option<&str>) -> Option<LostConnection> {
    if let Some(error) = error {
        return classify_exception(error, &[]);
    }
    let mut found: Option<Option<LostConnection>> = None;
    let mut is_chained = false;
    for (at, line) in tail.iter().enumerate() {
        if CHAIN_LINES.iter().any(|text| line.ends_with(text)) {
            is_chained = true;
        } else if let Some(exception) = find_exception(line) {
            if !is_chained || found.is_none() {
                found = Some(classify_exception(exception, &tail[at + 1..]));
            }
            is_chained = false;
        }
    }
    found.flatten()
}

/// Returns the torch component (Gloo, NCCL or TCPStore) whose lost connection an exception reports;
/// `None` for any other exception. `following` are the lines after the first line of the exception.
fn classify_exception(exception: &str, following: &[String]) -> Option<LostConnection> {
    let contains = |line: &str, texts: &[&str]| texts.iter().any(|text| line.contains(text));
    let rule = RULES.iter().find(|rule| contains(exception, rule.origins))?;
    let details = following.iter().take(rule.detail_lines).map(String::as_str);
    let mut lines = std::iter::once(exception).chain(details);
    lines.any(|line| contains(line, rule.losses)).then_some(rule.connection)
}

/// Returns the exception that a line of a program's output reports: the last line of a Python
/// traceback, or the message of a C++ exception. Returns `None` for any other line.
fn find_exception(line: &str) -> Option<&str> {
    // torch puts the rank in front of each line of a traceback.
    let text = match line.strip_prefix("[rank").and_then(|rest| rest.split_once("]: ")) {
        Some((rank, text)) if rank.bytes().all(|byte| byte.is_ascii_digit()) => text,
        _ => line,
    };
    if text.trim_start().starts_with("what():") {
        return Some(text);
    }
    let name = text.split_once(':').map_or(text, |(name, _)| name);
    let is_path = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.'));
    // NCCL explains its errors in lines that begin with the names of its results.
    let is_result_of_nccl = name.starts_with("nccl");
    (is_path && !is_result_of_nccl && TYPE_ENDINGS.iter().any(|ending| name.ends_with(ending)))
        .then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns what is found in the lines of `output`.
    fn find(output: &str) -> Option<LostConnection> {
        find_lost_connection(&output.lines().map(str::to_owned).collect::<Vec<_>>(), None)
    }

    /// The last lines of torch 2.15 and 2.8 over Gloo.
    const GLOO: [&str; 2] = [
        "[rank0]:   File \"/p/torch/distributed/distributed_c10d.py\", line 4181, in all_reduce\n\
         [rank0]:     work.wait()\n\
         [rank0]: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] \
         Connection closed by peer [127.0.0.1]:14993. This is typically caused by a remote worker crashing.\n",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:535] Read error \
         [127.0.0.1]:58274: Connection reset by peer\n",
    ];
    /// The exception of a process group of NCCL, and its end in torch's watchdog.
    const NCCL: [&str; 3] = [
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/\
         ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2.28.9\n\
         [rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting \
         prematurely.\n[rank1]: Last error:\n",
        "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, unhandled system error \
         (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n\
         ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n\
         Last error:\nCall to recv from 10.0.0.7<51024> failed : Connection reset by peer\n",
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID \
         0(default_pg) Rank 1] Process group watchdog thread terminated with exception: NCCL error: remote \
         process exited or there was a network error, NCCL version 2.21.5\n",
    ];
    /// The warning of a TCPStore and the exception that follows it.
    const STORE: &str = "\
[W1128 07:20:14.474734843 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=4): Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?
Traceback (most recent call last):
  File \"s.py\", line 7, in <module>
torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?
";

    #[test]
    fn exceptions_of_torch_about_lost_connections_are_found() {
        for output in GLOO {
            assert_eq!(find(output), Some(LostConnection::Gloo), "{output}");
        }
        for output in NCCL {
            assert_eq!(find(output), Some(LostConnection::Nccl), "{output}");
        }
        assert_eq!(find(STORE), Some(LostConnection::TcpStore));
        // Later lines of output are no exceptions.
        let later =
            format!("{}[rank0]:[W1128] Warning: destroy_process_group() was not called\nbye\n", GLOO[0]);
        assert_eq!(find(&later), Some(LostConnection::Gloo));
        let error =
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:535] writev: Broken pipe";
        assert_eq!(find_lost_connection(&[], Some(error)), Some(LostConnection::Gloo));
    }

    #[test]
    fn other_ends_of_programs_are_not_lost_connections() {
        for output in [
            "",
            "Connection reset by peer\n",
            "ConnectionResetError: [Errno 104] Connection reset by peer\n",
            "urllib.error.URLError: <urlopen error Connection reset by peer>\n",
            "[rank0]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out \
             waiting 5000ms for recv operation to complete\n",
            "torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled cuda error, NCCL version 2.21.5\n",
            "torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients\n",
            "ValueError: /gloo/gloo/transport/ is missing\n",
            // torch logs this warning without ending the program.
            "[W1128 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe\n",
        ] {
            assert_eq!(find(output), None, "{output}");
        }
        // A warning after the exception does not belong to the exception.
        assert_eq!(find(&format!("ValueError: bad\n{}", STORE.lines().next().unwrap_or_default())), None);
        // The recorded error is exact, the output is not.
        let tail: Vec<String> = GLOO[0].lines().map(str::to_owned).collect();
        assert_eq!(find_lost_connection(&tail, Some("ValueError: bad")), None);
    }

    #[test]
    fn the_first_exception_of_a_chain_counts_and_the_last_of_several_chains() {
        let chain = |first: &str, line: &str, second: &str| {
            find(&format!("{first}\n\n[rank0]: {line}\n\nTraceback (most recent call last):\n{second}\n"))
        };
        for line in CHAIN_LINES {
            assert_eq!(chain("ValueError: bad", line, GLOO[1]), None);
            assert_eq!(chain(GLOO[1], line, "RuntimeError: the epoch failed"), Some(LostConnection::Gloo));
        }
        assert_eq!(chain("ValueError: caught and logged", "next step", GLOO[1]), Some(LostConnection::Gloo));
        assert_eq!(chain(GLOO[1], "next step", "ValueError: bad"), None);
    }

    proptest! {
        #[test]
        fn untrusted_output_never_panics(lines in proptest::collection::vec(any::<String>(), 0..20)) {
            // Nothing in random text is an exception of torch.
            prop_assert_eq!(find_lost_connection(&lines, None), None);
        }
    }
}
