//! Starts `launch serve`, and requests paths of the page.
use super::JobDirectory;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Stdio},
    time::Duration,
};

/// The time in which the server must send data, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A process of `launch serve`, which is killed at the end of the test.
pub(crate) struct ServedPage {
    process: Child,
    /// The address of the page, which contains the token.
    pub(crate) url: String,
}

impl ServedPage {
    /// Starts `launch serve` with these further arguments, and waits until it prints its address.
    pub(crate) fn start(job: &JobDirectory, args: &[&str]) -> ServedPage {
        let args: Vec<&str> = ["serve"].iter().chain(args).copied().collect();
        let mut process =
            job.launch_command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut url).unwrap();
        ServedPage { process, url: url.trim_end().to_owned() }
    }

    /// Returns the pid of `launch serve`.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the address and port at which the server listens, and the token of the page.
    pub(crate) fn host_and_token(&self) -> (&str, &str) {
        let (host, rest) = self.url.strip_prefix("http://").unwrap().split_once("/?token=").unwrap();
        (host, rest.split('#').next().unwrap())
    }

    /// Requests a path with the token of the page, or without a token, and returns the connection.
    pub(crate) fn request(&self, path: &str, has_token: bool) -> TcpStream {
        let (host, token) = self.host_and_token();
        let authorization =
            if has_token { format!("Authorization: Bearer {token}\r\n") } else { String::new() };
        let mut stream = TcpStream::connect(host).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\n{authorization}\r\n").unwrap();
        stream
    }

    /// Requests a path, and returns the whole answer.
    pub(crate) fn get(&self, path: &str, has_token: bool) -> String {
        let mut answer = String::new();
        self.request(path, has_token).read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for ServedPage {
    fn drop(&mut self) {
        _ = self.process.kill();
        _ = self.process.wait();
    }
}
