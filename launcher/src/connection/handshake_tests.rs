//! Tests of the handshake and of invitations.
use super::*;
use proptest::prelude::*;
use tokio::io::duplex;

/// Runs a future to its end on this thread and returns its result.
fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Creates a key whose 32 bytes are all equal to `byte`.
fn key_from_byte(byte: u8) -> HandshakeKey {
    HandshakeKey([byte; 32])
}

/// Runs both sides of the handshake over an in-memory stream and returns the results of the agent
/// and of the controller. Then the agent sends one message, which the controller must read.
fn run_handshake(
    agent_key: HandshakeKey,
    controller_key: HandshakeKey,
    name: &str,
) -> (Result<(), HandshakeError>, Result<String, HandshakeError>) {
    block_on(async {
        let (agent_end, controller_end) = duplex(64);
        let agent = async {
            let stream =
                authenticate_controller(agent_end, &agent_key, name).await?.send_proof_of_key().await?;
            let (_input, mut output) = stream.into_halves(tokio::io::split);
            output.write_all(b"then").await?;
            output.flush().await.map_err(HandshakeError::from)
        };
        tokio::join!(agent, async {
            let (stream, name) = authenticate_agent(controller_end, &controller_key).await?;
            let (mut input, _output) = stream.into_halves(tokio::io::split);
            let mut next = [0; 4];
            input.read_exact(&mut next).await?;
            assert_eq!(&next, b"then", "the control stream follows the handshake directly");
            Ok(name)
        })
    })
}

#[test]
fn the_handshake_succeeds_with_equal_keys_only() {
    for name in ["n1", "", &"x".repeat(255)] {
        let (agent, controller) = run_handshake(key_from_byte(1), key_from_byte(1), name);
        agent.unwrap();
        assert_eq!(controller.unwrap(), name);
    }
    let (agent, controller) = run_handshake(key_from_byte(1), key_from_byte(2), "n1");
    assert!(matches!(controller, Err(HandshakeError::WrongKey(HandshakeRole::Agent))), "{controller:?}");
    assert!(matches!(agent, Err(HandshakeError::Closed)), "{agent:?}");
    let (agent, _) = run_handshake(key_from_byte(1), key_from_byte(1), &"x".repeat(256));
    assert!(matches!(agent, Err(HandshakeError::InvalidName)), "{agent:?}");
}

/// The bytes that each side of a handshake sent.
struct RecordedHandshake {
    hello: Vec<u8>,
    answer: Vec<u8>,
    proof: Vec<u8>,
}

/// Runs a handshake with the key `key_from_byte(4)` and the name `n`. `change` may change the bytes
/// of each side on their way. Returns the original bytes and the results of agent and controller.
fn relay_handshake(
    change: impl Fn(&mut RecordedHandshake),
) -> (RecordedHandshake, Result<(), HandshakeError>, Result<String, HandshakeError>) {
    block_on(async {
        let (near, mut far) = duplex(1024);
        let (mut tapped, tap) = duplex(1024);
        let agent = async {
            let verified = authenticate_controller(near, &key_from_byte(4), "n").await?;
            verified.send_proof_of_key().await.map(drop)
        };
        // The streams end with the relay.
        let relay = async move {
            let read = |bytes: &RecordedHandshake| RecordedHandshake {
                hello: bytes.hello.clone(),
                answer: bytes.answer.clone(),
                proof: bytes.proof.clone(),
            };
            let mut recorded =
                RecordedHandshake { hello: vec![0; 59], answer: vec![0; 48], proof: vec![0; 18] };
            _ = far.read_exact(&mut recorded.hello).await;
            let mut changed = read(&recorded);
            change(&mut changed);
            _ = tapped.write_all(&changed.hello).await;
            if tapped.read_exact(&mut recorded.answer).await.is_err() {
                return recorded;
            }
            let mut changed = read(&recorded);
            change(&mut changed);
            _ = far.write_all(&changed.answer).await;
            if far.read_exact(&mut recorded.proof).await.is_ok() {
                let mut changed = read(&recorded);
                change(&mut changed);
                _ = tapped.write_all(&changed.proof).await;
            }
            recorded
        };
        let key = key_from_byte(4);
        let controller = async { authenticate_agent(tap, &key).await.map(|(_, name)| name) };
        let (agent, recorded, controller) = tokio::join!(agent, relay, controller);
        (recorded, agent, controller)
    })
}

#[test]
fn each_changed_byte_of_a_handshake_is_detected() {
    let (recorded, agent, controller) = relay_handshake(|_| ());
    agent.unwrap();
    assert_eq!(controller.unwrap(), "n");
    for at in 0..recorded.hello.len() {
        // With a larger length, the controller waits for more bytes until its time limit.
        if at == PROTOCOL_MAGIC.len() || at == PROTOCOL_MAGIC.len() + 1 {
            continue;
        }
        let (_, agent, controller) = relay_handshake(|bytes| bytes.hello[at] ^= 1);
        assert!(agent.is_err() && controller.is_err(), "byte {at} of the hello");
    }
    for at in 0..recorded.answer.len() {
        let (_, agent, controller) = relay_handshake(|bytes| bytes.answer[at] ^= 1);
        assert!(matches!(agent, Err(HandshakeError::WrongKey(HandshakeRole::Controller))), "{agent:?}");
        controller.unwrap_err();
    }
    for at in 0..recorded.proof.len() {
        let (_, _, controller) = relay_handshake(|bytes| bytes.proof[at] ^= 1);
        assert!(matches!(controller, Err(HandshakeError::WrongKey(HandshakeRole::Agent))), "{controller:?}");
    }
}

#[test]
fn a_recorded_handshake_cannot_be_replayed_or_reflected() {
    let (recorded, ..) = relay_handshake(|_| ());
    let replay = |bytes: Vec<u8>| {
        block_on(async {
            let (mut near, far) = duplex(1024);
            near.write_all(&bytes).await.unwrap();
            authenticate_agent(far, &key_from_byte(4)).await.map(|(_, name)| name)
        })
    };
    let replayed = replay([&recorded.hello[..], &recorded.proof].concat());
    assert!(matches!(replayed, Err(HandshakeError::WrongKey(HandshakeRole::Agent))), "{replayed:?}");
    let header = [&PROTOCOL_MAGIC[..], &48_u16.to_le_bytes()].concat();
    let reflected = replay([&header[..], &recorded.answer, &recorded.proof].concat());
    assert!(matches!(reflected, Err(HandshakeError::WrongKey(HandshakeRole::Agent))), "{reflected:?}");
}

#[test]
fn a_name_and_later_bytes_are_not_readable_on_the_way() {
    let (recorded, ..) = relay_handshake(|_| ());
    assert_ne!(recorded.hello[PROTOCOL_MAGIC.len() + 2 + 32], b'n', "the name is encrypted");
    for (length, expected) in [(47_u16, "WrongProtocol"), (304, "WrongProtocol"), (u16::MAX, "WrongProtocol")]
    {
        let result = block_on(async {
            let (mut near, far) = duplex(1024);
            near.write_all(PROTOCOL_MAGIC).await.unwrap();
            near.write_all(&length.to_le_bytes()).await.unwrap();
            authenticate_agent(far, &key_from_byte(4)).await.map(|(_, name)| name)
        });
        assert_eq!(format!("{:?}", result.unwrap_err()), expected, "{length}");
    }
}

#[test]
fn an_invitation_round_trips_as_a_line() {
    let addresses: Vec<SocketAddr> =
        ["10.0.0.1:77", "[fd00::1]:77"].iter().map(|a| a.parse().unwrap()).collect();
    let invitation = Invitation { key: HandshakeKey::generate().unwrap(), addresses };
    let line = invitation.to_line();
    assert_eq!(Invitation::from_line(&line).unwrap(), invitation);
    let bytes = format!("{line}rest").into_bytes();
    let stream = &mut &bytes[..];
    assert_eq!(Invitation::read(stream).unwrap(), invitation);
    assert_eq!(*stream, b"rest");
    assert!(!format!("{invitation:?}").contains(&line[14..78]), "the key must not be printed");
    for wrong in [
        "",
        "launch-join-1",
        &line[..80],
        &line.replace("join-1", "join-2"),
        &line[..78].replace("join-1 ", "join-1 é"),
    ] {
        assert!(Invitation::from_line(wrong).is_err(), "{wrong}");
    }
    let long = vec![b'x'; MAX_INVITATION_BYTES + 2];
    assert!(matches!(Invitation::read(&mut &long[..]), Err(InvitationError::TooLong)));
}

proptest! {
    #[test]
    fn untrusted_bytes_are_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        block_on(async {
            let (mut near, far) = duplex(1024);
            near.write_all(&bytes).await.unwrap();
            near.shutdown().await.unwrap();
            assert!(authenticate_agent(far, &key_from_byte(5)).await.is_err());
        });
        assert!(fuzz_untrusted_connection(&bytes).is_err());
        _ = Invitation::read(&mut &bytes[..]);
    }

    #[test]
    fn untrusted_invitations_never_panic(
        line in "launch-join-1 [0-9a-zé]{60,66}( [0-9.:\\[\\]]{0,20}){0,20}"
    ) {
        _ = Invitation::from_line(&line);
    }
}

#[test]
fn a_node_with_another_key_learns_the_reason() {
    let (agent, controller) = block_on(async {
        let (agent_end, controller_end) = duplex(64);
        let (agent_key, controller_key) = (key_from_byte(1), key_from_byte(2));
        let agent = async { authenticate_controller(agent_end, &agent_key, "n1").await.map(drop) };
        tokio::join!(agent, async { authenticate_node(controller_end, &controller_key).await.map(drop) })
    });
    assert!(matches!(agent, Err(HandshakeError::WrongKey(HandshakeRole::Controller))), "{agent:?}");
    assert!(matches!(controller, Err(HandshakeError::WrongKey(HandshakeRole::Agent))), "{controller:?}");
}
