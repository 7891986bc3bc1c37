//! Measures how fast a rendezvous store, a server of torch's `TCPStore` protocol, serves many
//! clients. `store_bench CLIENTS` connects that many clients to `MASTER_ADDR`:`MASTER_PORT`. Each
//! sends the requests that torch's client sends when a job starts.
//!
//! `launch run -- target/release/examples/store_bench 10000` measures launch's store. With both
//! variables set by hand any other store is measured, such as torch's; `scripts/bench/store`
//! compares the two. Prints one JSON object; `server_cpu_s` is the CPU time of the process that
//! listens at the port.
use jobspec::env;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{error::Error, fs, path::PathBuf, time::Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

type BenchResult<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The number of GET requests that each client sends to the store, one after the other.
const GETS_PER_CLIENT: u32 = 10;
/// The number of file descriptors that the benchmark needs in addition to one connection per
/// client.
const EXTRA_FILE_DESCRIPTORS: u64 = 64;

fn main() -> BenchResult<()> {
    let clients: u32 = std::env::args().nth(1).ok_or("store_bench CLIENTS")?.parse()?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if hard < u64::from(clients) + EXTRA_FILE_DESCRIPTORS {
        return Err(format!("{clients} clients need more than the {hard} open files of `ulimit -Hn`").into());
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let (host, port) = (std::env::var(env::MASTER_ADDR)?, std::env::var(env::MASTER_PORT)?.parse()?);
    let server = find_listening_process(port)?;
    let used_before = read_cpu_seconds(&server)?;
    let run = run_clients(clients, format!("{host}:{port}"));
    let [connected, met, finished] =
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run)?;
    let cpu = read_cpu_seconds(&server)? - used_before;
    println!(
        "{{\"clients\": {clients}, \"connect_s\": {connected:.4}, \"meet_s\": {:.4}, \"gets_s\": {:.4}, \"all_s\": {finished:.4}, \
         \"server_cpu_s\": {cpu:.2}}}",
        met - connected,
        finished - met
    );
    Ok(())
}

/// Runs `clients` concurrent clients in this process against the store at `address`, and waits
/// until all have ended. Returns the seconds until all clients have connected, until all have
/// passed the barrier, and until all have read the key.
async fn run_clients(clients: u32, address: String) -> BenchResult<[f64; 3]> {
    let start = Instant::now();
    let mut connecting = JoinSet::new();
    for client in 0..clients {
        connecting.spawn(connect(address.clone(), client));
    }
    let connections = join_all(connecting).await?;
    let connected = start.elapsed();
    let mut meeting = JoinSet::new();
    for connection in connections {
        meeting.spawn(pass_barrier(connection, clients));
    }
    let connections = join_all(meeting).await?;
    let met = start.elapsed();
    let mut reading = JoinSet::new();
    for connection in connections {
        reading.spawn(get_key_repeatedly(connection));
    }
    join_all(reading).await?;
    Ok([connected, met, start.elapsed()].map(|time| time.as_secs_f64()))
}

/// Waits until all tasks (one per client) have ended, and collects their results.
async fn join_all<T: 'static>(mut tasks: JoinSet<BenchResult<T>>) -> BenchResult<Vec<T>> {
    let mut done = Vec::new();
    while let Some(result) = tasks.join_next().await {
        done.push(result??);
    }
    Ok(done)
}

/// Encodes a text in the format of the `TCPStore` protocol: its length, then its bytes.
fn encode_text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Connects client number `client` to the store at `address`, performs the handshake, and sends
/// VALIDATE and PING.
async fn connect(address: String, client: u32) -> BenchResult<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let handshake = [&[0][..], &0x3C85_F7CEu32.to_le_bytes(), &[13], &client.to_le_bytes()].concat();
    stream.write_all(&handshake).await?;
    if stream.read_u32_le().await? != client {
        return Err("the store answered PING with another nonce".into());
    }
    Ok(stream)
}

/// Waits until all clients have arrived at a barrier, which uses ADD and WAIT requests as torch
/// does. The last client to arrive SETs the key for which all clients wait.
async fn pass_barrier(mut stream: TcpStream, clients: u32) -> BenchResult<TcpStream> {
    let add = [&[4][..], &encode_text("/count"), &1i64.to_le_bytes()].concat();
    stream.write_all(&add).await?;
    if stream.read_i64_le().await? % i64::from(clients) == 0 {
        stream.write_all(&[&[1][..], &encode_text("/go"), &encode_text("now")].concat()).await?;
    }
    stream.write_all(&[&[6][..], &1u64.to_le_bytes(), &encode_text("/go")].concat()).await?;
    if stream.read_u8().await? != 0 {
        return Err("the store cancelled WAIT".into());
    }
    Ok(stream)
}

/// Sends [`GETS_PER_CLIENT`] GET requests for a key that the last client sets in the store, and
/// checks the replies.
async fn get_key_repeatedly(mut stream: TcpStream) -> BenchResult<()> {
    let get = [&[3][..], &encode_text("/go")].concat();
    for _ in 0..GETS_PER_CLIENT {
        stream.write_all(&get).await?;
        let mut answer = [0; 11];
        stream.read_exact(&mut answer).await?;
        if answer[8..] != *b"now" {
            return Err("the store answered GET with another value".into());
        }
    }
    Ok(())
}

/// Finds the process of the measured store, which is the one that listens at the TCP port `port` of
/// this machine. Returns the path of its `/proc/PID/stat`.
fn find_listening_process(port: u16) -> BenchResult<PathBuf> {
    const TCP_STATE_LISTEN: &str = "0A";
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in fs::read_to_string(table)?.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (local, state, inode) = (fields[1], fields[3], fields[9]);
            if state == TCP_STATE_LISTEN
                && local.ends_with(&format!(":{port:04X}"))
                && let Some(process) = find_socket_owner(&format!("socket:[{inode}]"))
            {
                return Ok(process.join("stat"));
            }
        }
    }
    Err(format!("no process of this user listens at port {port} of this machine").into())
}

/// Finds a process of this machine that has the socket `socket`, written as `socket:[INODE]`, among
/// its open files. Returns the directory of the process in /proc.
fn find_socket_owner(socket: &str) -> Option<PathBuf> {
    let list = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    list("/proc".into()).find(|process| {
        list(process.join("fd")).any(|fd| fs::read_link(fd).is_ok_and(|to| to.as_os_str() == socket))
    })
}

/// Reads the file `/proc/PID/stat` at the path `stat`, and returns the CPU time in seconds (user
/// and system) that the process has used.
fn read_cpu_seconds(stat: &PathBuf) -> BenchResult<f64> {
    let stat = fs::read_to_string(stat)?;
    let (_, after_name) = stat.rsplit_once(')').ok_or("/proc/PID/stat has no process name")?;
    let ticks =
        after_name.split_whitespace().skip(11).take(2).map(str::parse::<f64>).sum::<Result<f64, _>>()?;
    let hz = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100);
    Ok(ticks / hz as f64)
}
