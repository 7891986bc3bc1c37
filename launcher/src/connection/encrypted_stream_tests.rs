//! Tests of encrypted streams: altered records, sizes and throughput.
use super::*;
use crate::connection::{MessagePriority, Outbox, read_frames, write_frames};
use proptest::prelude::*;
use protocol::control::FromAgent;
use snow::Builder;
use std::time::Instant;
use tokio::sync::mpsc;

/// Runs a future to its end on this thread and returns its result.
fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Performs the handshake of an encrypted connection in memory. Returns the session keys of both
/// sides.
fn agree_on_keys() -> (StatelessTransportState, StatelessTransportState) {
    let builder = || Builder::new("Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s".parse().unwrap());
    let mut near = builder().psk(0, &[1; 32]).unwrap().build_initiator().unwrap();
    let mut far = builder().psk(0, &[1; 32]).unwrap().build_responder().unwrap();
    let mut message = [0; 48];
    near.write_message(&[], &mut message).unwrap();
    far.read_message(&message, &mut []).unwrap();
    far.write_message(&[], &mut message).unwrap();
    near.read_message(&message, &mut []).unwrap();
    (near.into_stateless_transport_mode().unwrap(), far.into_stateless_transport_mode().unwrap())
}

/// Writes each of `texts` to an encrypted stream, and flushes the stream after each. Returns the
/// encrypted records, and the keys with which the other side decrypts them.
fn encrypt(texts: &[Vec<u8>]) -> (Vec<Vec<u8>>, StatelessTransportState) {
    let (near, far) = agree_on_keys();
    let mut records = Vec::new();
    let mut writer = EncryptedStream::new(Vec::new(), near).into_halves(|stream| ((), stream)).1;
    block_on(async {
        for text in texts {
            writer.write_all(text).await.unwrap();
            writer.flush().await.unwrap();
            let mut bytes = &std::mem::take(&mut writer.stream)[..];
            while let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
                let (record, rest) = bytes.split_at(HEADER_BYTES + usize::from(u16::from_le_bytes(*header)));
                records.push(record.to_vec());
                bytes = rest;
            }
        }
    });
    (records, far)
}

/// Decrypts `bytes`, a sequence of records, to its end. Returns the decrypted text, and the error
/// that ended the stream.
fn decrypt(bytes: &[u8], keys: StatelessTransportState) -> (Vec<u8>, io::Result<()>) {
    let mut reader = EncryptedStream::new(bytes, keys).into_halves(|stream| (stream, ())).0;
    let mut text = Vec::new();
    let result = block_on(reader.read_to_end(&mut text)).map(drop);
    (text, result)
}

#[test]
fn records_that_are_repeated_moved_left_out_or_cut_are_rejected() {
    let texts = ["one", "two", "three"].map(|text| text.as_bytes().to_vec());
    for (order, arrives, error) in [
        (&[0, 1, 2][..], "onetwothree", None),
        (&[0, 0], "one", Some(io::ErrorKind::InvalidData)),
        (&[1, 0], "", Some(io::ErrorKind::InvalidData)),
        (&[0, 2], "one", Some(io::ErrorKind::InvalidData)),
        (&[0, 1], "onetwo", None),
    ] {
        let (records, keys) = encrypt(&texts);
        let stream: Vec<u8> = order.iter().flat_map(|index| records[*index].clone()).collect();
        let (text, result) = decrypt(&stream, keys);
        assert_eq!((text, result.err().map(|e| e.kind())), (arrives.as_bytes().to_vec(), error), "{order:?}");
    }
    let (records, keys) = encrypt(&texts);
    let (_, other_keys) = agree_on_keys();
    assert_eq!(decrypt(&records[0], other_keys).1.unwrap_err().kind(), io::ErrorKind::InvalidData);
    let mut reader = EncryptedStream::new(&records[1][..], keys).into_halves(|stream| (stream, ())).0;
    for _ in 0..2 {
        let error = block_on(reader.read_u8()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "an altered stream stays unusable");
    }
}

#[test]
fn a_record_has_at_most_64_kib() {
    let (records, keys) = encrypt(&[vec![7; 3 * MAX_PLAINTEXT_BYTES]]);
    assert_eq!(records.iter().map(Vec::len).collect::<Vec<_>>(), [HEADER_BYTES + 65_535; 3]);
    assert_eq!(decrypt(&records.concat(), keys).0, vec![7; 3 * MAX_PLAINTEXT_BYTES]);
    for length in 0..TAG_BYTES as u16 {
        let result = decrypt(&length.to_le_bytes(), agree_on_keys().0).1;
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidData, "{length}");
    }
}

#[test]
fn messages_of_every_size_arrive_through_a_slow_stream() {
    block_on(async {
        let (near, far) = tokio::io::duplex(1000);
        let (near_keys, far_keys) = agree_on_keys();
        let (unread, output) = EncryptedStream::new(near, near_keys).into_halves(tokio::io::split);
        let (input, _output) = EncryptedStream::new(far, far_keys).into_halves(tokio::io::split);
        let (mut outbox, receiver) = Outbox::channel();
        let (inbox, mut arrived) = mpsc::channel(1);
        let build_line = |size: usize| FromAgent::Line { rank: 0, stderr: false, text: "x".repeat(size) };
        let sizes = [0, 1, 65_000, 65_519, 65_536, 1 << 20, 3];
        for size in sizes {
            outbox.send_message(MessagePriority::Critical, build_line(size));
        }
        drop(outbox);
        tokio::spawn(write_frames(output, receiver));
        tokio::spawn(read_frames((), input, inbox));
        for size in sizes {
            assert_eq!(arrived.recv().await.unwrap().1.unwrap(), Some(build_line(size)));
        }
        drop(unread);
        assert!(matches!(arrived.recv().await, Some(((), Ok(None)))));
    });
}

/// Prints the throughput of output lines of 100 bytes through a TCP connection.
#[test]
#[ignore = "a measurement"]
fn throughput_of_lines() {
    const LINES: usize = 1_000_000;
    for encrypted in [false, true, false, true] {
        let seconds = block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let near = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (far, _) = listener.accept().await.unwrap();
            let (outgoing, receiver) = mpsc::channel(4096);
            let (inbox, mut arrived) = mpsc::channel(256);
            let began = Instant::now();
            if encrypted {
                let (near_keys, far_keys) = agree_on_keys();
                let (_, output) =
                    EncryptedStream::new(near, near_keys).into_halves(tokio::net::TcpStream::into_split);
                let (input, end) =
                    EncryptedStream::new(far, far_keys).into_halves(tokio::net::TcpStream::into_split);
                tokio::spawn(write_frames(output, receiver));
                tokio::spawn(async move {
                    read_frames((), input, inbox).await;
                    drop(end);
                });
            } else {
                tokio::spawn(write_frames(near.into_split().1, receiver));
                tokio::spawn(async move {
                    let (input, end) = far.into_split();
                    read_frames((), input, inbox).await;
                    drop(end);
                });
            }
            tokio::spawn(async move {
                for _ in 0..LINES {
                    let line = FromAgent::Line { rank: 0, stderr: false, text: "x".repeat(100) };
                    outgoing.send(line).await.unwrap();
                }
            });
            for _ in 0..LINES {
                assert!(matches!(arrived.recv().await.unwrap().1, Ok(Some(FromAgent::Line { .. }))));
            }
            began.elapsed().as_secs_f64()
        });
        println!("encrypted: {encrypted}, {:.0} MB/s of text", LINES as f64 * 100.0 / 1e6 / seconds);
    }
}

proptest! {
    #[test]
    fn bytes_arrive_unchanged_in_any_division(
        sizes in proptest::collection::vec(0usize..200_000, 0..6),
        seed in any::<u8>(),
    ) {
        let texts: Vec<Vec<u8>> =
            sizes.iter().map(|size| (0..*size).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect()).collect();
        let (records, keys) = encrypt(&texts);
        let (text, result) = decrypt(&records.concat(), keys);
        prop_assert!(result.is_ok());
        prop_assert!(text == texts.concat());
    }

    #[test]
    fn each_changed_bit_and_each_cut_is_detected(
        sizes in proptest::collection::vec(1usize..300, 1..5),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let texts: Vec<Vec<u8>> = sizes.iter().map(|size| vec![9; *size]).collect();
        let (records, keys) = encrypt(&texts);
        let mut stream = records.concat();
        let at = at.index(stream.len());
        stream[at] ^= 1 << bit;
        let (text, result) = decrypt(&stream, keys);
        prop_assert!(result.is_err());
        prop_assert!(text.len() < texts.concat().len() && text.iter().all(|byte| *byte == 9));
        let (records, keys) = encrypt(&texts);
        let (text, result) = decrypt(&records.concat()[..at], keys);
        let is_boundary = text.len() < texts.concat().len() && result.is_ok();
        prop_assert!(result.is_err() || is_boundary);
    }

    #[test]
    fn untrusted_records_are_rejected(bytes in proptest::collection::vec(any::<u8>(), 1..600)) {
        let (text, result) = decrypt(&bytes, agree_on_keys().0);
        prop_assert!(text.is_empty() && result.is_err());
    }
}
