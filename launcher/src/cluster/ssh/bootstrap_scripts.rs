//! The shell scripts that run on a host over SSH to start an agent, and to copy the executable of
//! launch to the host.
//!
//! Every command is `exec /bin/sh -c '…'` without single quotes, `!` or backslashes inside, which
//! any login shell (sh, bash, zsh, ksh, csh, fish) passes on unchanged.
//!
//! Through OpenSSH's client, one shell runs all scripts of a host. Scripts that change the
//! environment therefore run in a subshell, and a script that fails ends the shell, which would
//! otherwise take the rest of the executable for scripts.
use std::net::SocketAddr;

/// The time limit, in seconds, for fetching the executable of launch from one address of another
/// host.
pub(super) const FETCH_TIMEOUT_S: u32 = 60;
/// The largest number of addresses of one other host at which a host tries to fetch the executable
/// of launch.
pub(super) const MAX_FETCH_ADDRESSES: usize = 2;

/// Wraps a shell script in a command line that every login shell (such as csh or fish) passes to
/// `/bin/sh` without changing the script.
pub(super) fn wrap_in_shell_command(script: &str) -> String {
    format!("exec /bin/sh -c '{script}'")
}

/// Shell code that sets the shell variable `d` to the directory on the host in which executables of
/// launch are cached.
const SET_CACHE_DIR_SCRIPT: &str = "d=${XDG_CACHE_HOME:-$HOME/.cache}/launch/bin";

/// Returns shell code that moves the verified copy `$t` to its place `$f` in the cache, without
/// replacing an executable with this hash that another copy has put there in the meantime. `fail`
/// is the code for a failure.
///
/// Other hosts may run that executable from a home directory that they share. On NFS, the server
/// deletes a replaced file although other hosts run it, and their processes are then killed. A link
/// is made only if there is no file. An existing file that is not the executable is replaced.
fn build_placing_script(hash: &str, fail: &str) -> String {
    format!(
        "if ln \"$t\" \"$f\" 2> /dev/null || {{ touch -c \"$f\" 2> /dev/null; \
         [ \"$(\"$f\" agent --own-hash 2> /dev/null)\" = {hash} ]; }}; \
         then rm -f \"$t\"; else mv -f \"$t\" \"$f\" || {fail}; fi"
    )
}

/// Builds the shell script that starts the cached executable of launch on a host as an agent, if
/// the host has this executable. If the host lacks the executable, or has a file of another size
/// than `size` in its place, the script prints `MARKER missing MACHINE`. The modification time of
/// the executable becomes the time of its last use.
pub(super) fn build_agent_start_script(marker: &str, hash: &str, size: u64, in_tree: bool) -> String {
    let local = std::env::consts::ARCH;
    let option = if in_tree { " --tree" } else { "" };
    format!(
        "{SET_CACHE_DIR_SCRIPT}; f=$d/{hash}; m=$(uname -m); \
         if [ \"$m\" = {local} ] && {{ touch -c \"$f\" 2> /dev/null; [ -x \"$f\" ]; }} && \
         [ $(wc -c < \"$f\") -eq {size} ]; then \
         exec \"$f\" agent --marker {marker}{option}; fi; \
         echo; echo {marker} missing \"$m\""
    )
}

/// Builds the shell script with which a host fetches launch's executable from another host,
/// verifies its hash and caches it. The script prints `MARKER done` or `MARKER fail STEP CODE`. The
/// shell cannot encrypt the connection, so it verifies the SHA-256 hash before it runs the copy.
pub(super) fn build_executable_fetch_script(
    marker: &str,
    (hash, sha256, size): (&str, &str, u64),
    addresses: &[SocketAddr],
    token: &str,
) -> String {
    let fail = |step: &str| format!("{{ c=$?; rm -f \"$t\"; echo; echo {marker} fail {step} $c; exit 1; }}");
    let (directory, write, fetch, run, wrong, place) = (
        fail("directory"),
        fail("write"),
        fail("fetch"),
        fail("run"),
        fail("hash"),
        build_placing_script(hash, &fail("place")),
    );
    let addresses: Vec<String> = addresses
        .iter()
        .take(MAX_FETCH_ADDRESSES)
        .map(|address| format!("{}/{}", address.ip(), address.port()))
        .collect();
    let addresses = addresses.join(" ");
    format!(
        "( LC_ALL=C; export LC_ALL; umask 077; {SET_CACHE_DIR_SCRIPT}; f=$d/{hash}; t=$d/.{marker}; \
         mkdir -p \"$d\" || {directory}; : > \"$t\" || {write}; \
         for p in bash cat sha256sum timeout; do command -v $p > /dev/null || {fetch}; done; \
         n=0; for a in {addresses}; do \
         timeout {FETCH_TIMEOUT_S} bash -c \"exec 3<>/dev/tcp/$a && echo fetch {token} >&3 && cat <&3\" > \"$t\"; \
         if [ $(wc -c < \"$t\") -eq {size} ]; then n=1; break; fi; done; \
         [ $n -eq 1 ] || {fetch}; h=$(sha256sum < \"$t\") || {wrong}; [ \"${{h%% *}}\" = {sha256} ] || {wrong}; \
         chmod 700 \"$t\" || {write}; h=$(\"$t\" agent --own-hash) || {run}; \
         [ \"$h\" = {hash} ] || {wrong}; {place}; echo; echo {marker} done ) || exit 1"
    )
}

/// Builds the shell script that reads launch's executable from stdin, verifies its hash and caches
/// it on the host. The script prints `MARKER ready` before it reads, and `MARKER done` or `MARKER
/// fail STEP CODE` at the end.
pub(super) fn build_executable_copy_script(marker: &str, hash: &str, size: u64) -> String {
    let fail = |step: &str| format!("{{ c=$?; rm -f \"$t\"; echo; echo {marker} fail {step} $c; exit 1; }}");
    let (directory, write, short, run, wrong, place) = (
        fail("directory"),
        fail("write"),
        fail("size"),
        fail("run"),
        fail("hash"),
        build_placing_script(hash, &fail("place")),
    );
    format!(
        "( LC_ALL=C; export LC_ALL; umask 077; {SET_CACHE_DIR_SCRIPT}; f=$d/{hash}; t=$d/.{marker}; \
         mkdir -p \"$d\" || {directory}; : > \"$t\" || {write}; echo; echo {marker} ready; \
         head -c {size} > \"$t\" || {write}; [ $(wc -c < \"$t\") -eq {size} ] || {short}; \
         chmod 700 \"$t\" || {write}; h=$(\"$t\" agent --own-hash) || {run}; \
         [ \"$h\" = {hash} ] || {wrong}; {place}; echo; echo {marker} done ) || exit 1"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ssh::copy_failure::classify_copy_failure;
    use diagnostic::codes::host;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn scripts_have_no_characters_that_a_login_shell_interprets() {
        let addresses =
            ["10.0.0.1:5".parse().expect("an address"), "[fd00::1]:5".parse().expect("an address")];
        for script in [
            build_agent_start_script("m", "h", 5, false),
            build_agent_start_script("m", "h", 5, true),
            build_executable_copy_script("m", "h", 5),
            build_executable_fetch_script("m", ("h", "s", 5), &addresses, "t"),
        ] {
            assert!(!script.contains(['\'', '!', '\\', '\n', '`']), "{script}");
        }
    }

    /// Runs the copy script with the home directory `home`, and with the shell script `program` as
    /// the executable, whose expected size is `size` bytes. Returns the last answer and stderr.
    fn run_copy_script(home: &std::path::Path, program: &str, size: usize) -> (String, String) {
        run_script(home, &build_executable_copy_script("MARK", "HASH", size as u64), program)
    }

    /// Runs a script with the home directory `home` and with `input` on stdin. Returns the last
    /// answer and stderr.
    fn run_script(home: &std::path::Path, script: &str, input: &str) -> (String, String) {
        let script = wrap_in_shell_command(script);
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &script]).env("HOME", home).env_remove("XDG_CACHE_HOME");
        let mut child = shell
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a shell");
        _ = child.stdin.take().expect("stdin").write_all(input.as_bytes());
        let output = child.wait_with_output().expect("its output");
        let text = String::from_utf8_lossy(&output.stdout);
        let answer = text.lines().filter_map(|l| l.strip_prefix("MARK ")).next_back().unwrap_or("");
        (answer.to_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn a_copy_is_checked_before_it_is_moved_into_place() {
        let home = tempfile::tempdir().expect("a directory");
        let cache = home.path().join(".cache/launch/bin");
        let files = || std::fs::read_dir(&cache).map_or(0, Iterator::count);
        let program = "#!/bin/sh\necho HASH\n";
        for (program, size, expected) in [
            (program, program.len() + 1, "fail size"),
            ("#!/bin/sh\necho OTHER\n", 21, "fail hash"),
            ("#!/bin/sh\nexit 7\n", 17, "fail run 7"),
            ("#!/no/such/shell\n", 17, "fail run"),
        ] {
            let (answer, _) = run_copy_script(home.path(), program, size);
            let is_expected = answer == expected || answer.starts_with(&format!("{expected} "));
            assert!(is_expected, "{program}: {answer}");
            assert_eq!(files(), 0, "{expected} must leave no file");
        }
        assert_eq!(run_copy_script(home.path(), program, program.len()).0, "done");
        assert_eq!(files(), 1);
        std::fs::write(home.path().join("file"), "").expect("a file");
        let (answer, stderr) = run_copy_script(&home.path().join("file"), program, program.len());
        assert_eq!(classify_copy_failure(&answer, &stderr).code, host::EXECUTABLE_CACHE_UNWRITABLE);
    }

    #[test]
    fn a_copy_does_not_replace_the_same_executable_of_another_host() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let home = tempfile::tempdir().expect("a directory");
        let cache = home.path().join(".cache/launch/bin");
        let (placed, program) = (cache.join("HASH"), "#!/bin/sh\necho HASH\n");
        std::fs::create_dir_all(&cache).expect("a directory");
        for (existing, mode, is_kept) in [
            (program, 0o700, true),
            ("#!/bin/sh\necho OTHER\n", 0o700, false),
            ("#!/no/such/shell\n", 0o700, false),
            (program, 0o600, false),
        ] {
            std::fs::write(&placed, existing).expect("a file");
            std::fs::set_permissions(&placed, PermissionsExt::from_mode(mode)).expect("its mode");
            let inode = || std::fs::metadata(&placed).expect("a file").ino();
            let before = inode();
            assert_eq!(run_copy_script(home.path(), program, program.len()).0, "done");
            assert_eq!(inode() == before, is_kept, "{existing}");
            assert_eq!(std::fs::read_to_string(&placed).expect("a file"), program);
            assert_eq!(
                std::fs::read_dir(&cache).expect("a directory").count(),
                1,
                "no temporary file remains"
            );
        }
    }

    /// Serves `program` to one client that sends the token `token`. Returns the address.
    fn serve_program(program: &'static str) -> SocketAddr {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut request = [0; 12];
            std::io::Read::read_exact(&mut stream, &mut request).expect("a request");
            assert_eq!(&request, b"fetch token\n");
            stream.write_all(program.as_bytes()).expect("sent");
        });
        address
    }

    #[test]
    fn an_executable_of_another_host_is_verified_before_it_runs() {
        use sha2::Digest;
        let home = tempfile::tempdir().expect("a directory");
        let cache = home.path().join(".cache/launch/bin");
        let program = "#!/bin/sh\necho HASH\n";
        let hash: String = sha2::Sha256::digest(program).iter().map(|byte| format!("{byte:02x}")).collect();
        let closed = "127.0.0.1:9".parse().expect("an address");
        let other = "#!/bin/sh\n: > \"$HOME/ran\"\n";
        for (served, size, addresses, expected) in [
            (program, program.len(), &[closed, serve_program(program)][..], "done"),
            (other, other.len(), &[serve_program(other)], "fail hash"),
            (program, program.len() + 1, &[serve_program(program)], "fail fetch"),
            (program, program.len(), &[closed], "fail fetch"),
        ] {
            _ = std::fs::remove_dir_all(&cache);
            let script =
                build_executable_fetch_script("MARK", ("HASH", &hash, size as u64), addresses, "token");
            let (answer, stderr) = run_script(home.path(), &script, "");
            assert!(answer.starts_with(expected), "{served}: {answer}, {stderr}");
            let files = std::fs::read_dir(&cache).map_or(0, Iterator::count);
            assert_eq!(files, usize::from(expected == "done"), "{expected}");
        }
        assert!(!home.path().join("ran").exists(), "a file with another hash is not run");
    }
}
