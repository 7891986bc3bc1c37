//! Many clients of a rendezvous store at once: `store_bench CLIENTS` connects them all to `MASTER_ADDR`:`MASTER_PORT`,
//! each as torch's client does, and times what a start of that many ranks asks of the store.
//!
//! `launch run -- target/release/examples/store_bench 10000` measures launch's store; with both variables set by hand it
//! measures any other, torch's own say. `scripts/bench/store` does both in turn. Prints one JSON object; `server_cpu_s` is
//! the processor time of the process that listens at the port.
use contract::env;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{error::Error, fs, path::PathBuf, time::Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// GETs of each client, one after another.
const GETS: u32 = 10;
/// Descriptors beside one for each client.
const OTHER_FILES: u64 = 64;

fn main() -> Outcome<()> {
    let clients: u32 = std::env::args().nth(1).ok_or("store_bench CLIENTS")?.parse()?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if hard < u64::from(clients) + OTHER_FILES {
        return Err(format!("{clients} clients need more than the {hard} open files of `ulimit -Hn`").into());
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let (host, port) = (std::env::var(env::MASTER_ADDR)?, std::env::var(env::MASTER_PORT)?.parse()?);
    let server = listener(port)?;
    let used = cpu_seconds(&server)?;
    let run = run(clients, format!("{host}:{port}"));
    let [connected, met, all] =
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run)?;
    let cpu = cpu_seconds(&server)? - used;
    println!(
        "{{\"clients\": {clients}, \"connect_s\": {connected:.4}, \"meet_s\": {:.4}, \"gets_s\": {:.4}, \"all_s\": {all:.4}, \
         \"server_cpu_s\": {cpu:.2}}}",
        met - connected,
        all - met
    );
    Ok(())
}

/// Seconds until all are connected, have met, and have read.
async fn run(clients: u32, address: String) -> Outcome<[f64; 3]> {
    let start = Instant::now();
    let mut connecting = JoinSet::new();
    for client in 0..clients {
        connecting.spawn(connect(address.clone(), client));
    }
    let connections = all(connecting).await?;
    let connected = start.elapsed();
    let mut meeting = JoinSet::new();
    for connection in connections {
        meeting.spawn(meet(connection, clients));
    }
    let connections = all(meeting).await?;
    let met = start.elapsed();
    let mut reading = JoinSet::new();
    for connection in connections {
        reading.spawn(read(connection));
    }
    all(reading).await?;
    Ok([connected, met, start.elapsed()].map(|time| time.as_secs_f64()))
}

async fn all<T: 'static>(mut tasks: JoinSet<Outcome<T>>) -> Outcome<Vec<T>> {
    let mut done = Vec::new();
    while let Some(result) = tasks.join_next().await {
        done.push(result??);
    }
    Ok(done)
}

/// A length and its bytes.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Connects and says hello: VALIDATE and PING.
async fn connect(address: String, client: u32) -> Outcome<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let hello = [&[0][..], &0x3C85_F7CEu32.to_le_bytes(), &[13], &client.to_le_bytes()].concat();
    stream.write_all(&hello).await?;
    if stream.read_u32_le().await? != client {
        return Err("another nonce came back".into());
    }
    Ok(stream)
}

/// A barrier as torch builds it from ADD and WAIT: the last client SETs what all wait for.
async fn meet(mut stream: TcpStream, clients: u32) -> Outcome<TcpStream> {
    let add = [&[4][..], &text("/count"), &1i64.to_le_bytes()].concat();
    stream.write_all(&add).await?;
    if stream.read_i64_le().await? % i64::from(clients) == 0 {
        stream.write_all(&[&[1][..], &text("/go"), &text("now")].concat()).await?;
    }
    stream.write_all(&[&[6][..], &1u64.to_le_bytes(), &text("/go")].concat()).await?;
    if stream.read_u8().await? != 0 {
        return Err("the wait was cancelled".into());
    }
    Ok(stream)
}

async fn read(mut stream: TcpStream) -> Outcome<()> {
    let get = [&[3][..], &text("/go")].concat();
    for _ in 0..GETS {
        stream.write_all(&get).await?;
        let mut answer = [0; 11];
        stream.read_exact(&mut answer).await?;
        if answer[8..] != *b"now" {
            return Err("another value came back".into());
        }
    }
    Ok(())
}

/// `/proc/PID/stat` of the process that listens at a port of this network.
fn listener(port: u16) -> Outcome<PathBuf> {
    const LISTENS: &str = "0A";
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in fs::read_to_string(table)?.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (local, state, inode) = (fields[1], fields[3], fields[9]);
            if state == LISTENS
                && local.ends_with(&format!(":{port:04X}"))
                && let Some(process) = owner(&format!("socket:[{inode}]"))
            {
                return Ok(process.join("stat"));
            }
        }
    }
    Err(format!("no process of this user listens at port {port} of this machine").into())
}

/// The process that has this socket open.
fn owner(socket: &str) -> Option<PathBuf> {
    let list = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    list("/proc".into()).find(|process| {
        list(process.join("fd")).any(|fd| fs::read_link(fd).is_ok_and(|to| to.as_os_str() == socket))
    })
}

/// User and system time that a process has used.
fn cpu_seconds(stat: &PathBuf) -> Outcome<f64> {
    let stat = fs::read_to_string(stat)?;
    let (_, after_name) = stat.rsplit_once(')').ok_or("an odd /proc/PID/stat")?;
    let ticks =
        after_name.split_whitespace().skip(11).take(2).map(str::parse::<f64>).sum::<Result<f64, _>>()?;
    let hz = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100);
    Ok(ticks / hz as f64)
}
