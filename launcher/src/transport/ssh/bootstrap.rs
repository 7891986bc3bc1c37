//! The executable on a host: started when it is there, copied and checked when it isn't.
//!
//! Every command is `exec /bin/sh -c '…'` with neither quotes, `!` nor backslashes inside, which any login shell (sh, bash, zsh,
//! ksh, csh, fish) hands on untouched. Whatever the login shell prints on its own comes before a line with a random
//! marker, and is noise.
use super::{
    connect::refuse,
    progress::{Progress, Stage},
    target::Target,
};
use crate::transport::Refusal;
use ssh2::{Channel, Session};
use std::{
    fs::File,
    io::{self, Read, Write},
    sync::OnceLock,
};

/// For a shell or the executable to answer, milliseconds.
const ANSWER: u32 = 30_000;
/// For one piece of the executable to get on its way while it is copied, milliseconds.
const COPY: u32 = 60_000;
/// Most that a login shell may print before launch's own command runs, bytes.
const MAX_NOISE: usize = 256 << 10;
/// Most of stderr that is kept, bytes.
const MAX_SAID: u64 = 8 << 10;
/// Piece of a copy, bytes.
const PIECE: usize = 256 << 10;

/// The executable that runs here: what other hosts get.
#[derive(Debug)]
pub(super) struct Executable {
    file: File,
    /// BLAKE3, hexadecimal.
    pub(super) hash: String,
    size: u64,
}

impl Executable {
    /// Reads and hashes it, once.
    pub(super) fn own() -> Result<&'static Executable, String> {
        static OWN: OnceLock<Result<Executable, String>> = OnceLock::new();
        let read = || Self::read().map_err(|e| format!("this executable can't be read: {e}"));
        OWN.get_or_init(read).as_ref().map_err(Clone::clone)
    }

    fn read() -> io::Result<Executable> {
        let file = File::open("/proc/self/exe")?;
        let size = file.metadata()?.len();
        let hash = crate::agent::own_hash()?;
        Ok(Executable { file, hash, size })
    }
}

/// An agent that said its marker; what it said after it is in `leftover`.
pub(super) struct Running {
    pub(super) channel: Channel,
    pub(super) leftover: Vec<u8>,
}

/// Gets an agent running over this session.
pub(super) fn start(
    target: &Target,
    session: &Session,
    executable: &Executable,
    progress: &Progress,
) -> Result<Running, Refusal> {
    progress.at(Stage::Exec);
    let marker = marker().map_err(|e| refuse(target, &format!("no random numbers here: {e}"), None))?;
    let mut host = Host { target, session, executable, progress, marker };
    if let Tried::Running(running) = host.run()? {
        return Ok(running);
    }
    host.copy()?;
    match host.run()? {
        Tried::Running(running) => Ok(running),
        Tried::Missing => {
            let what = "the executable was copied there, and is gone again";
            Err(refuse(target, what, Some("is something cleaning ~/.cache/launch on the host?")))
        }
    }
}

/// 128 random bits as text.
fn marker() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().fold("launch-".to_owned(), |text, b| text + &format!("{b:02x}")))
}

enum Tried {
    Running(Running),
    Missing,
}

struct Host<'a> {
    target: &'a Target,
    session: &'a Session,
    executable: &'a Executable,
    progress: &'a Progress,
    marker: String,
}

impl Host<'_> {
    fn refuse(&self, what: &str, hint: &str) -> Refusal {
        refuse(self.target, what, (!hint.is_empty()).then_some(hint))
    }

    fn exec(&self, script: &str) -> Result<Stream, Refusal> {
        self.progress.check(&self.target.name)?;
        self.session.set_timeout(ANSWER);
        let open = self.session.channel_session().and_then(|mut channel| {
            channel.exec(&command(script))?;
            Ok(channel)
        });
        let channel = open.map_err(|e| {
            let hint = "may this user run commands over SSH (ForceCommand, a restricted key, MaxSessions)?";
            self.refuse(&format!("it runs no commands: {}", e.message()), hint)
        })?;
        Ok(Stream { channel, bytes: Vec::new() })
    }

    /// Starts the executable where it is.
    fn run(&mut self) -> Result<Tried, Refusal> {
        let mut stream = self.exec(&run_script(&self.marker, &self.executable.hash))?;
        let line = self.marked(&mut stream)?;
        let mut words = line.split(' ');
        match (words.next(), words.next()) {
            (Some("agent"), _) => {
                self.progress.at(Stage::Agent);
                Ok(Tried::Running(Running { channel: stream.channel, leftover: stream.bytes }))
            }
            (Some("missing"), Some(machine)) => {
                _ = stream.channel.close();
                same_machine(machine).map_err(|(what, hint)| self.refuse(&what, &hint))?;
                Ok(Tried::Missing)
            }
            _ => Err(self.refuse(&format!("an answer that launch did not write: `{}`", shown(&line)), "")),
        }
    }

    /// The rest of the next line that begins with the marker; what comes before it is noise.
    fn marked(&self, stream: &mut Stream) -> Result<String, Refusal> {
        let mut noise = Vec::new();
        loop {
            match stream.line() {
                Ok(Some(line)) => match find(&line, self.marker.as_bytes()) {
                    Some(at) => {
                        noise.extend(&line[..at]);
                        self.progress.heard(&noise);
                        let rest = &line[at + self.marker.len()..];
                        return Ok(String::from_utf8_lossy(rest).trim().to_owned());
                    }
                    None => noise.extend(line),
                },
                Ok(None) => return Err(self.unanswered(stream, &noise)),
                Err(error) => {
                    let what = match error.kind() {
                        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                            format!("no answer to a command within {} s{}", ANSWER / 1000, said(&noise))
                        }
                        _ => format!("the connection was lost while launch was started there: {error}"),
                    };
                    return Err(self.refuse(&what, "does the login shell of this user wait for something?"));
                }
            }
            if noise.len() > MAX_NOISE {
                let what = format!("the login shell prints without end{}", said(&noise));
                return Err(
                    self.refuse(&what, "let its start-up files print nothing when there is no terminal")
                );
            }
        }
    }

    /// The stream ended without the marker.
    fn unanswered(&self, stream: &mut Stream, noise: &[u8]) -> Refusal {
        let (code, error) = stream.end();
        let heard = said(&[noise, b"\n", error.as_bytes()].concat());
        match code {
            126 | 127 => self.refuse(
                &format!("the executable can't be run there (exit code {code}){heard}"),
                &format!(
                    "remove ~/.cache/launch/bin/{} on the host; it is copied again",
                    self.executable.hash
                ),
            ),
            _ => self.refuse(
                &format!("the login shell ended (exit code {code}) before launch's command ran{heard}"),
                "does `ssh HOST true` work? The login shell or its start-up files leave at once",
            ),
        }
    }

    /// Copies the executable, checks what arrived, and puts it in its place.
    fn copy(&mut self) -> Result<(), Refusal> {
        let Executable { hash, size, .. } = self.executable;
        let mut stream = self.exec(&copy_script(&self.marker, hash, *size))?;
        let line = self.marked(&mut stream)?;
        if line != "ready" {
            return Err(self.not_copied(&line, &mut stream));
        }
        self.session.set_timeout(COPY);
        let sent = self.send(&mut stream.channel);
        let line = match sent {
            // When the host stopped reading, it says why; when the connection broke, so does the next read.
            Ok(()) | Err(Sending::Host) => self.marked(&mut stream)?,
            Err(Sending::Here(error)) => {
                return Err(self.refuse(&format!("this executable can't be read: {error}"), ""));
            }
        };
        if line != "done" {
            return Err(self.not_copied(&line, &mut stream));
        }
        _ = stream.channel.close();
        Ok(())
    }

    fn send(&self, channel: &mut Channel) -> Result<(), Sending> {
        let mut file = self.executable.file.try_clone().map_err(Sending::Here)?;
        // The descriptor's position is shared with the copies to other hosts.
        let mut at = 0;
        let mut piece = vec![0; PIECE];
        loop {
            let n = read_at(&mut file, &mut piece, at).map_err(Sending::Here)?;
            if n == 0 {
                break;
            }
            channel.write_all(&piece[..n]).map_err(|_| Sending::Host)?;
            at += n as u64;
        }
        channel.send_eof().map_err(|_| Sending::Host)
    }

    /// `fail STEP CODE`: what the copying script got stuck at.
    fn not_copied(&self, line: &str, stream: &mut Stream) -> Refusal {
        let (_, error) = stream.end();
        let (what, hint) = explain(line, &error);
        self.refuse(&what, &hint)
    }
}

fn read_at(file: &mut File, into: &mut [u8], at: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, into, at)
}

enum Sending {
    Host,
    Here(io::Error),
}

/// What a failed step of copying means: what and what to do.
fn explain(line: &str, error: &str) -> (String, String) {
    let mut words = line.split(' ');
    let (step, code) = match words.next() {
        Some("fail") => (words.next().unwrap_or(""), words.next().unwrap_or("")),
        _ => ("", ""),
    };
    let has = |part: &str| error.to_lowercase().contains(part);
    let reason = said(error.as_bytes());
    let elsewhere = "or set XDG_CACHE_HOME on the host to a directory that is fit for it";
    match step {
        _ if has("no space left") => {
            ("the disk is full: the executable can't be copied there".to_owned() + &reason, format!("free some space in the home directory, {elsewhere}"))
        }
        _ if has("quota exceeded") => {
            ("the user's disk quota is used up: the executable can't be copied there".to_owned() + &reason, format!("free some space in the home directory, {elsewhere}"))
        }
        "directory" | "write" if has("read-only file system") => {
            ("the cache directory is on a read-only file system".to_owned() + &reason, format!("make ~/.cache writable, {elsewhere}"))
        }
        "directory" | "write" if has("permission denied") => {
            ("no permission to write the cache directory".to_owned() + &reason, format!("make ~/.cache belong to the user, {elsewhere}"))
        }
        "directory" | "write" => (format!("the executable can't be written to the cache directory{reason}"), format!("make ~/.cache writable, {elsewhere}")),
        "size" => ("the copy of the executable is shorter than it should be".to_owned() + &reason, "try again; if it stays so, look at the host's disk".to_owned()),
        "run" if code == "126" && has("exec format error") => {
            ("the executable is for another kind of machine".to_owned() + &reason, "hosts of one job have the same architecture".to_owned())
        }
        "run" if code == "126" => {
            ("programs can't be run from the cache directory: its file system is mounted noexec, or a policy forbids it".to_owned() + &reason, format!("mount it with exec, {elsewhere}"))
        }
        "run" if has("glibc_") => {
            ("the host's C library is older than launch needs".to_owned() + &reason, "build launch on (or for) the oldest system of the cluster".to_owned())
        }
        "run" => (format!("the executable doesn't run there (exit code {code}){reason}"), "does it run when it is copied by hand?".to_owned()),
        "hash" => ("the copy of the executable is not what was sent".to_owned() + &reason, "try again; if it stays so, look at the host's disk and memory".to_owned()),
        "place" => (format!("the executable can't be put in its place{reason}"), "make ~/.cache/launch writable".to_owned()),
        _ => (format!("copying the executable was answered by `{}`{reason}", shown(line)), String::new()),
    }
}

/// The host runs our kind of programs, or why not.
fn same_machine(machine: &str) -> Result<(), (String, String)> {
    let own = std::env::consts::ARCH;
    match machine == own {
        true => Ok(()),
        false => Err((
            format!("other architecture: the host is {machine}, this executable is for {own}"),
            format!(
                "hosts of one job have the same architecture: leave it out, or start launch on a {machine} machine"
            ),
        )),
    }
}

/// `: it said "…"`, the last lines; empty when there are none.
fn said(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(3)..];
    match last.is_empty() {
        true => String::new(),
        false => format!(": it said \"{}\"", shown(&last.join(" / "))),
    }
}

fn shown(text: &str) -> String {
    text.chars().take(300).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

/// Lines of a channel, and what follows them.
struct Stream {
    channel: Channel,
    bytes: Vec<u8>,
}

impl Stream {
    /// The next line with its end; also a last one without; `None` at the end.
    fn line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.bytes.iter().position(|b| *b == b'\n') {
                return Ok(Some(self.bytes.drain(..=at).collect()));
            }
            // noise without line ends
            if self.bytes.len() > MAX_NOISE {
                return Ok(Some(std::mem::take(&mut self.bytes)));
            }
            let mut piece = [0; 4096];
            match self.channel.read(&mut piece)? {
                0 if self.bytes.is_empty() => return Ok(None),
                0 => return Ok(Some(std::mem::take(&mut self.bytes))),
                n => self.bytes.extend(&piece[..n]),
            }
        }
    }

    /// Exit code and stderr of a command that has ended.
    fn end(&mut self) -> (i32, String) {
        let mut error = Vec::new();
        _ = self.channel.stream(super::STDERR).take(MAX_SAID).read_to_end(&mut error);
        _ = self.channel.send_eof();
        let code = self.channel.wait_close().and_then(|()| self.channel.exit_status()).unwrap_or(-1);
        (code, String::from_utf8_lossy(&error).into_owned())
    }
}

/// A script as a command that any login shell hands to /bin/sh.
fn command(script: &str) -> String {
    format!("exec /bin/sh -c '{script}'")
}

const CACHE: &str = "d=${XDG_CACHE_HOME:-$HOME/.cache}/launch/bin";

/// `MARKER agent` by the executable itself, or `MARKER missing MACHINE`.
fn run_script(marker: &str, hash: &str) -> String {
    let own = std::env::consts::ARCH;
    format!(
        "{CACHE}; f=$d/{hash}; m=$(uname -m); \
         if [ \"$m\" = {own} ] && [ -x \"$f\" ]; then exec \"$f\" agent --marker {marker}; fi; \
         echo; echo {marker} missing \"$m\""
    )
}

/// `MARKER ready`, then the executable on stdin, then `MARKER done` or `MARKER fail STEP CODE`.
fn copy_script(marker: &str, hash: &str, size: u64) -> String {
    let fail = |step: &str| format!("{{ c=$?; rm -f \"$t\"; echo; echo {marker} fail {step} $c; exit 1; }}");
    let (directory, write, short, run, wrong, place) =
        (fail("directory"), fail("write"), fail("size"), fail("run"), fail("hash"), fail("place"));
    format!(
        "LC_ALL=C; export LC_ALL; umask 077; {CACHE}; f=$d/{hash}; t=$d/.{marker}; \
         mkdir -p \"$d\" || {directory}; : > \"$t\" || {write}; echo; echo {marker} ready; \
         cat > \"$t\" || {write}; [ $(wc -c < \"$t\") -eq {size} ] || {short}; \
         chmod 700 \"$t\" || {write}; h=$(\"$t\" agent --own-hash) || {run}; \
         [ \"$h\" = {hash} ] || {wrong}; mv -f \"$t\" \"$f\" || {place}; echo; echo {marker} done"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn commands_survive_any_login_shell() {
        for script in [run_script("m", "h"), copy_script("m", "h", 5)] {
            assert!(!script.contains(['\'', '!', '\\', '\n', '`']), "{script}");
        }
    }

    /// The copying script with a shell script in the executable's place.
    fn copied(home: &std::path::Path, program: &str, size: usize) -> (String, String) {
        let script = command(&copy_script("MARK", "HASH", size as u64));
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &script]).env("HOME", home).env_remove("XDG_CACHE_HOME");
        let mut child = shell
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a shell");
        _ = child.stdin.take().expect("stdin").write_all(program.as_bytes());
        let output = child.wait_with_output().expect("its output");
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().filter_map(|l| l.strip_prefix("MARK ")).next_back().unwrap_or("").to_owned();
        (last, String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn a_copy_is_checked_before_it_is_in_its_place() {
        let home = tempfile::tempdir().expect("a directory");
        let bin = home.path().join(".cache/launch/bin");
        let left = || std::fs::read_dir(&bin).map_or(0, Iterator::count);
        let program = "#!/bin/sh\necho HASH\n";
        for (program, size, expected) in [
            (program, program.len() + 1, "fail size"),
            ("#!/bin/sh\necho OTHER\n", 21, "fail hash"),
            ("#!/bin/sh\nexit 7\n", 17, "fail run 7"),
            ("#!/no/such/shell\n", 17, "fail run"),
        ] {
            let (line, _) = copied(home.path(), program, size);
            assert!(line.starts_with(expected), "{program}: {line}");
            assert_eq!(left(), 0, "{expected} leaves nothing");
        }
        assert_eq!(copied(home.path(), program, program.len()).0, "done");
        assert_eq!(left(), 1);
        std::fs::write(home.path().join("file"), "").expect("a file");
        let (line, error) = copied(&home.path().join("file"), program, program.len());
        assert!(line.starts_with("fail directory"), "{line}");
        assert!(explain(&line, &error).0.contains("can't be written"), "{error}");
    }

    #[test]
    fn each_failure_is_told_apart() {
        for (line, error, part) in [
            ("fail write 1", "cat: write error: No space left on device", "disk is full"),
            ("fail write 1", "cat: write error: Disk quota exceeded", "quota"),
            ("fail directory 1", "mkdir: cannot create directory: Permission denied", "no permission"),
            ("fail directory 1", "mkdir: cannot create directory: Read-only file system", "read-only"),
            ("fail run 126", "sh: 1: x: Permission denied", "noexec"),
            ("fail run 126", "sh: 1: x: Exec format error", "another kind of machine"),
            ("fail run 1", "x: /lib/libc.so.6: version `GLIBC_2.38' not found", "C library"),
            ("fail hash 1", "", "not what was sent"),
            ("hello", "", "answered by `hello`"),
        ] {
            assert!(explain(line, error).0.contains(part), "{line}: {}", explain(line, error).0);
        }
        assert!(same_machine(std::env::consts::ARCH).is_ok());
        assert!(same_machine("riscv64").is_err_and(|(what, _)| what.contains("riscv64")));
    }
}
