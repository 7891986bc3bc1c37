//! Tests that connections between nodes carry no secret in plain text.
use super::cluster::{SlurmCluster, wait_until};
use crate::support::{output_to_text, report_skip};
use std::fs;

/// A Python program that writes every network packet of its node to the file `capture`. The program
/// creates the file `capturing` when it begins, and ends when the file `stop` exists.
const CAPTURE: &str = "\
import os, socket
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
packets.settimeout(0.2)
with open('capture', 'wb') as out:
    open('capturing', 'w').close()
    while True:
        try:
            out.write(packets.recv(1 << 17))
        except TimeoutError:
            if os.path.exists('stop'):
                break
open('captured', 'w').close()
";

/// Checks that the captured packets contain no secret. The job gets its secrets from the job file,
/// a file, two variables and the command line, and prints one line on each node.
#[test]
fn a_packet_capture_of_a_job_on_two_nodes_contains_no_secret() {
    let test = "a_packet_capture_of_a_job_on_two_nodes_contains_no_secret";
    let Some(cluster) = SlurmCluster::start(test, 2) else { return };
    if !cluster.run_on_node("h0", "python3 -c 'import socket; socket.AF_PACKET'").status.success() {
        return report_skip(test, "needs python3 on the nodes");
    }
    let write = |name: &str, text: &str| fs::write(cluster.shared_path(name), text).unwrap();
    write("capture.py", CAPTURE);
    write("token.txt", "sesame-file-81\n");
    cluster.write_program_job(
        "{}",
        "env: {LITERAL_TOKEN: sesame-job-82, A: {from_file: token.txt}, B: {from_env: LAUNCH_TEST_VALUE}}\n  \
         pass_env: ['PASSED_*']\n  logs: {show: [0, 1]}",
        "env > got.$RANK; echo printed-line-$RANK",
    );
    write(
        "run.sh",
        "export LAUNCH_TEST_VALUE=sesame-env-83 PASSED_TOKEN=sesame-passed-84\n\
         exec ./launch job.yaml --set run.env.HF_TOKEN=sesame-set-85\n",
    );
    cluster.run_on_node_successfully("h0", "setsid python3 capture.py < /dev/null > capture.log 2>&1 &");
    let capture_log = || cluster.read_shared_file("capture.log");
    let wait_for = |name: &str| {
        wait_until(name, capture_log, || cluster.shared_path(name).exists().then_some(()));
    };
    wait_for("capturing");
    let ran = cluster.run_on_node("h0", "salloc -Q -N2 sh run.sh");
    let text = output_to_text(&ran);
    assert!(ran.status.success(), "{text}");
    assert!(text.contains("printed-line-0") && text.contains("printed-line-1"), "{text}");
    let send = "python3 -c 'import socket; socket.socket(2, 2).sendto(b\"capture-works\", (\"h1\", 9))'";
    cluster.run_on_node_successfully("h0", send);
    write("stop", "");
    wait_for("captured");
    let capture = fs::read(cluster.shared_path("capture")).unwrap();
    let contains = |text: &str| capture.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(
        contains("capture-works") && contains("launchJ2"),
        "the capture has the connections of the agents"
    );
    let secrets = ["sesame-file-81", "sesame-job-82", "sesame-env-83", "sesame-passed-84", "sesame-set-85"];
    for rank in 0..2 {
        let got = cluster.read_shared_file(&format!("got.{rank}"));
        assert!(secrets.iter().all(|secret| got.contains(secret)), "{got}");
    }
    for secret in secrets.iter().chain(&["printed-line-"]) {
        assert!(!contains(secret), "the capture contains {secret}");
    }
    cluster.assert_nothing_left();
}
