//! Many clients of a rendezvous store at once: `store_bench CLIENTS` connects them all to `MASTER_ADDR`:`MASTER_PORT`,
//! each as torch's client does, and times what a start of that many ranks asks of the store.
//!
//! `launch run -- target/release/examples/store_bench 10000` measures launch's store; with both variables set by hand it
//! measures any other, torch's own say.
use contract::env;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{error::Error, time::Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// GETs of each client, one after another.
const GETS: u32 = 10;

fn main() -> Outcome<()> {
    let clients: u32 = std::env::args().nth(1).ok_or("store_bench CLIENTS")?.parse()?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let address = format!("{}:{}", std::env::var(env::MASTER_ADDR)?, std::env::var(env::MASTER_PORT)?);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(clients, address))
}

async fn run(clients: u32, address: String) -> Outcome<()> {
    let start = Instant::now();
    let mut connecting = JoinSet::new();
    for client in 0..clients {
        connecting.spawn(connect(address.clone(), client));
    }
    let mut connections = Vec::new();
    while let Some(connection) = connecting.join_next().await {
        connections.push(connection??);
    }
    let connected = start.elapsed();
    let mut meeting = JoinSet::new();
    for connection in connections {
        meeting.spawn(meet(connection, clients));
    }
    let mut connections = Vec::new();
    while let Some(connection) = meeting.join_next().await {
        connections.push(connection??);
    }
    let met = start.elapsed();
    let mut reading = JoinSet::new();
    for connection in connections {
        reading.spawn(read(connection));
    }
    while let Some(read) = reading.join_next().await {
        read??;
    }
    let all = start.elapsed();
    let (connected, met, all) = (connected.as_secs_f64(), met.as_secs_f64(), all.as_secs_f64());
    println!(
        "{clients} clients: connect {connected:.3} s, add and wait for all {:.3} s, {GETS} gets each {:.3} s; {all:.3} s in all",
        met - connected,
        all - met
    );
    Ok(())
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

/// ADD; the last client SETs what all WAIT for.
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
