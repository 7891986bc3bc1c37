//! Tests in which a sandbox process misbehaves as a library could do with an untrusted file: it
//! panics, loops, or uses too much memory.
use super::*;
use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    process::Command,
    time::{Duration, Instant},
};

/// Name of the environment variable by which a process recognizes that it is the sandbox process of
/// a test.
const IS_SANDBOX: &str = "LAUNCH_TEST_IS_SANDBOX";

/// The main function of the sandbox process that other tests start. Does nothing when it runs as a
/// test.
#[test]
fn run_sandbox() {
    if std::env::var_os(IS_SANDBOX).is_some() {
        std::process::exit(serve(|_| Box::new(TestHandler)).into());
    }
}

/// A request handler that does what the request names, such as a panic or an endless loop.
struct TestHandler;

impl RequestHandler for TestHandler {
    fn handle_request(
        &mut self,
        request: &[u8],
        file: Option<File>,
        report_step: &mut ReportStepFn,
    ) -> Vec<u8> {
        let request = String::from_utf8_lossy(request).into_owned();
        let (operation, argument) = request.split_once(' ').unwrap_or((&request, ""));
        let number = || argument.parse::<usize>().unwrap_or(0);
        let denied = |result: std::io::Result<()>| format!("{:?}", result.map_err(|e| e.kind())).into_bytes();
        match operation {
            "echo" => argument.as_bytes().to_vec(),
            "repeat" => vec![b'x'; number()],
            "panic" => panic!("at {argument}"),
            "allocate" => vec![1u8; number()][..1].to_vec(),
            "recurse" => vec![recurse(number()) as u8],
            "spin" => loop {
                std::hint::spin_loop();
            },
            "sleep" => {
                std::thread::sleep(Duration::from_secs(number() as u64));
                Vec::new()
            }
            "spin-in-step" => {
                report_step(6);
                report_step(7);
                limit_cpu_time(Duration::from_secs(60), || ());
                limit_cpu_time(Duration::from_secs(1), || {
                    loop {
                        std::hint::spin_loop();
                    }
                })
            }
            "limited" => {
                // Work that ends or waits exceeds no limit.
                for _ in 0..3 {
                    limit_cpu_time(Duration::from_millis(200), || {
                        std::thread::sleep(Duration::from_millis(300));
                    });
                }
                b"done".to_vec()
            }
            // SAFETY: no page is mapped at this address, so the kernel ends the process.
            "segfault" => vec![unsafe { std::ptr::without_provenance::<u8>(8).read_volatile() }],
            "abort" => std::process::abort(),
            "exit" => std::process::exit(number() as i32),
            "threads" => {
                let threads = (0..8).map(|i| std::thread::spawn(move || i));
                let threads: Vec<_> = threads.collect();
                vec![threads.into_iter().map(|t| t.join().unwrap()).sum::<u8>()]
            }
            "open" => denied(File::open(argument).map(drop)),
            "create" => denied(File::create(argument).map(drop)),
            "remove" => denied(fs::remove_file(argument)),
            "list" => denied(fs::read_dir(argument).map(drop)),
            "chmod" => denied(fs::set_permissions(argument, fs::Permissions::from_mode(0o777))),
            "connect" => denied(std::net::TcpStream::connect(argument).map(drop)),
            "listen" => denied(TcpListener::bind(argument).map(drop)),
            "run" => denied(Command::new(argument).status().map(drop)),
            "variables" => std::env::vars().map(|(name, _)| name + " ").collect::<String>().into_bytes(),
            "read" => {
                let mut bytes = Vec::new();
                file.unwrap().read_to_end(&mut bytes).unwrap();
                bytes
            }
            "write" => denied(file.unwrap().write_all(b"changed")),
            "size" => file.unwrap().metadata().unwrap().len().to_string().into_bytes(),
            other => panic!("unknown operation {other}"),
        }
    }
}

/// Calls itself `depth` times, to use up the stack.
fn recurse(depth: usize) -> usize {
    let bytes = std::hint::black_box([1u8; 256]);
    if depth == 0 { 0 } else { recurse(depth - 1) + bytes.len() }
}

/// The limits that most requests in these tests have.
const LIMITS: RequestLimits =
    RequestLimits { cpu: Duration::from_secs(2), memory_bytes: 64 << 20, reply_bytes: 1 << 20 };

/// Starts the executable of these tests as a sandbox process that runs [`run_sandbox`].
fn start_sandbox() -> SandboxProcess {
    let command = SandboxCommand {
        program: std::env::current_exe().unwrap().into(),
        name: "sandbox".into(),
        arguments: ["tests::run_sandbox", "--exact", "--nocapture"].map(Into::into).into(),
        variables: vec![(IS_SANDBOX.into(), "1".into())],
    };
    SandboxProcess::start(&command, &SandboxSettings { threads: 2, memory_bytes: 256 << 20 }).unwrap()
}

/// Sends a request and receives its reply as text.
fn call(sandbox: &mut SandboxProcess, request: &str, file: Option<&File>) -> Result<String, SandboxError> {
    sandbox.send_request(request.as_bytes(), file, &LIMITS);
    let reply = sandbox.receive_reply().map_err(|failure| failure.error)?;
    Ok(String::from_utf8(reply).unwrap())
}

#[test]
fn requests_are_answered_in_order_also_after_panics_and_long_replies() {
    let mut sandbox = start_sandbox();
    assert_eq!(call(&mut sandbox, "echo a", None).unwrap(), "a");
    let panicked = call(&mut sandbox, "panic noon", None).expect_err("a panic");
    let message = panicked.to_string();
    assert!(message.contains("at noon (") && message.contains("tests.rs:"), "{message}");
    let too_long = call(&mut sandbox, "repeat 1048577", None).expect_err("too long");
    assert_eq!(too_long.exceeded_limit(), Some(("result_limit_bytes", 1 << 20)));
    assert_eq!(call(&mut sandbox, "repeat 1048576", None).unwrap().len(), 1 << 20);
    assert_eq!(call(&mut sandbox, "threads", None).unwrap(), "\u{1c}");
    assert_eq!(call(&mut sandbox, "limited", None).unwrap(), "done");
    assert_eq!(sandbox.pending_requests(), 0);
}

#[test]
fn many_large_requests_may_be_pending() {
    let mut sandbox = start_sandbox();
    let text = "x".repeat(300_000);
    for _ in 0..20 {
        sandbox.send_request(format!("echo {text}").as_bytes(), None, &LIMITS);
    }
    assert_eq!(sandbox.pending_requests(), 20);
    for _ in 0..20 {
        assert_eq!(sandbox.receive_reply().unwrap(), text.as_bytes());
    }
}

/// A function that checks whether a request failed with the expected error.
type ErrorCheck = fn(&SandboxError) -> bool;

#[test]
fn exceeded_limits_and_crashes_end_the_sandbox_with_their_reason() {
    let cases: [(&str, ErrorCheck); 12] = [
        ("allocate 10000000000", |e| matches!(e, SandboxError::OutOfMemory { limit_bytes: 0x400_0000 })),
        ("allocate 90000000", |e| matches!(e, SandboxError::OutOfMemory { .. })),
        ("recurse 100000000", |e| matches!(e, SandboxError::StackOverflow { stack_bytes: 0x40_0000 })),
        ("spin", |e| matches!(e, SandboxError::OutOfCpuTime { limit_s: 2 })),
        ("abort", |e| matches!(e, SandboxError::OutOfMemory { .. })),
        ("segfault", |e| matches!(e, SandboxError::StackOverflow { .. })),
        ("exit 0", |e| matches!(e, SandboxError::Ended(_))),
        ("exit 7", |e| matches!(e, SandboxError::Ended(text) if text.contains('7'))),
        ("allocate 60000000000000", |e| matches!(e, SandboxError::OutOfMemory { .. })),
        ("recurse 20000", |e| matches!(e, SandboxError::StackOverflow { .. })),
        ("spin-in-step", |e| matches!(e, SandboxError::OutOfCpuTime { limit_s: 1 })),
        ("spin again", |e| matches!(e, SandboxError::OutOfCpuTime { .. })),
    ];
    for (request, is_expected) in cases {
        let began = Instant::now();
        let mut sandbox = start_sandbox();
        sandbox.send_request(b"echo before", None, &LIMITS);
        sandbox.send_request(request.as_bytes(), None, &LIMITS);
        sandbox.send_request(b"echo after", None, &LIMITS);
        assert_eq!(sandbox.receive_reply().unwrap(), b"before");
        let failure = sandbox.receive_reply().expect_err(request);
        assert!(is_expected(&failure.error), "{request}: {failure:?}");
        assert_eq!(failure.step, if request == "spin-in-step" { 7 } else { 0 }, "{request}");
        sandbox.receive_reply().expect_err("the sandbox process has ended");
        assert_eq!(sandbox.pending_requests(), 0, "{request}");
        assert!(began.elapsed() < Duration::from_secs(60), "{request}");
    }
}

/// Checks that replies which arrive together with the end of the process are received before the
/// error.
#[test]
fn replies_before_a_crash_are_received_however_late_they_are_read() {
    let mut sandbox = start_sandbox();
    for request in ["echo a", "panic noon", "echo b", "exit 3", "echo c"] {
        sandbox.send_request(request.as_bytes(), None, &LIMITS);
    }
    let stat = format!("/proc/{}/stat", sandbox.pid());
    let deadline = Instant::now() + Duration::from_secs(20);
    while !fs::read_to_string(&stat).unwrap().contains(") Z ") {
        assert!(Instant::now() < deadline, "the sandbox process still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(sandbox.receive_reply().unwrap(), b"a");
    let panicked = sandbox.receive_reply().expect_err("a panic");
    assert!(matches!(panicked.error, SandboxError::Panicked { .. }), "{panicked:?}");
    assert_eq!(sandbox.receive_reply().unwrap(), b"b");
    let ended = sandbox.receive_reply().expect_err("the end");
    assert!(matches!(&ended.error, SandboxError::Ended(text) if text.contains('3')), "{ended:?}");
    sandbox.receive_reply().expect_err("no reply after the end");
    assert_eq!(sandbox.pending_requests(), 0);
}

#[test]
fn a_request_within_its_limits_succeeds_after_a_larger_one() {
    let mut sandbox = start_sandbox();
    for (request, memory_bytes) in
        [("allocate 40000000", 64 << 20), ("allocate 200000000", 250 << 20), ("allocate 40000000", 64 << 20)]
    {
        sandbox.send_request(request.as_bytes(), None, &RequestLimits { memory_bytes, ..LIMITS });
        assert_eq!(sandbox.receive_reply().unwrap(), [1], "{request}");
    }
    // No request may use more memory than the settings allow.
    sandbox.send_request(b"allocate 300000000", None, &RequestLimits { memory_bytes: 1 << 40, ..LIMITS });
    sandbox.receive_reply().expect_err("more than the settings allow");
}

#[test]
fn the_sandbox_has_no_files_network_processes_or_variables() {
    let dir = tempfile::tempdir().unwrap();
    let existing = dir.path().join("f");
    fs::write(&existing, "content").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (path, address) = (existing.display(), listener.local_addr().unwrap());
    let mut sandbox = start_sandbox();
    let confinement = sandbox.confinement();
    assert_eq!(confinement.missing_facilities(), Vec::<&str>::new(), "the kernel of the tests has both");
    for request in [
        format!("open {path}"),
        "open /etc/passwd".to_owned(),
        "open /proc/self/environ".to_owned(),
        format!("create {path}2"),
        format!("create {path}"),
        format!("remove {path}"),
        format!("list {}", dir.path().display()),
        format!("chmod {path}"),
        format!("connect {address}"),
        "listen 127.0.0.1:0".to_owned(),
        "run /bin/true".to_owned(),
    ] {
        assert_eq!(call(&mut sandbox, &request, None).unwrap(), "Err(PermissionDenied)", "{request}");
    }
    assert_eq!(fs::read(&existing).unwrap(), b"content");
    assert_eq!(call(&mut sandbox, "variables", None).unwrap(), format!("{IS_SANDBOX} "));
    let limits = fs::read_to_string(format!("/proc/{}/limits", sandbox.pid())).unwrap();
    for name in ["Max core file size", "Max file size"] {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        assert!(line.split_whitespace().take(2).eq(["0", "0"]), "{name}{line}");
    }
}

#[test]
fn the_sandbox_reads_files_that_it_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, "content").unwrap();
    let mut sandbox = start_sandbox();
    for _ in 0..100 {
        let file = File::open(&path).unwrap();
        assert_eq!(call(&mut sandbox, "read", Some(&file)).unwrap(), "content");
    }
    assert_eq!(call(&mut sandbox, "size", Some(&File::open(&path).unwrap())).unwrap(), "7");
    let writable = File::options().write(true).open(&path).unwrap();
    assert_eq!(call(&mut sandbox, "write", Some(&writable)).unwrap(), "Err(FileTooLarge)");
    assert_eq!(fs::read(&path).unwrap(), b"content", "a sandbox process writes no file");
}

#[test]
fn the_sandbox_ends_with_its_caller() {
    let mut sandbox = start_sandbox();
    let pid = sandbox.pid();
    sandbox.send_request(b"sleep 1000", None, &LIMITS);
    // Closes the socket as the end of the caller would, without a signal to the process.
    sandbox.shut_down_socket();
    let deadline = Instant::now() + Duration::from_secs(20);
    let is_zombie =
        || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
    while !is_zombie() {
        assert!(Instant::now() < deadline, "the sandbox process still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_program_that_is_no_sandbox_did_not_start() {
    let settings = SandboxSettings { threads: 1, memory_bytes: 64 << 20 };
    for (program, script) in
        [("/bin/true", ""), ("/nonexistent", ""), ("/bin/sh", "yes >&0"), ("/bin/sh", "exit 3")]
    {
        let arguments = if script.is_empty() { Vec::new() } else { vec!["-c".into(), script.into()] };
        let name = "sh".into();
        let command = SandboxCommand { program: program.into(), name, arguments, variables: Vec::new() };
        let error = SandboxProcess::start(&command, &settings).expect_err(program);
        assert!(matches!(error, SandboxError::NotStarted(_)), "{program}: {error}");
    }
}
