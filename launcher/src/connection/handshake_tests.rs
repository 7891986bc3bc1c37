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
        let (agent_end, mut controller_end) = duplex(64);
        let agent = async {
            let mut stream =
                authenticate_controller(agent_end, &agent_key, name).await?.send_agent_proof().await?;
            stream.write_all(b"then").await.map_err(HandshakeError::from)
        };
        tokio::join!(agent, async {
            let name = authenticate_agent(&mut controller_end, &controller_key).await?;
            let mut next = [0; 4];
            controller_end.read_exact(&mut next).await?;
            assert_eq!(&next, b"then", "the control stream follows the handshake directly");
            drop(controller_end);
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
    assert!(matches!(agent, Err(HandshakeError::WrongKey(HandshakeRole::Controller))), "{agent:?}");
    controller.unwrap_err();
    let (agent, _) = run_handshake(key_from_byte(1), key_from_byte(1), &"x".repeat(256));
    assert!(matches!(agent, Err(HandshakeError::InvalidName)), "{agent:?}");
}

#[test]
fn the_controllers_proof_cannot_be_reflected() {
    block_on(async {
        let (mut near, mut far) = duplex(1024);
        let attacker = async {
            near.write_all(MAGIC).await.unwrap();
            near.write_all(&[7; 32]).await.unwrap();
            near.write_all(b"\x01n").await.unwrap();
            let mut nonce_and_proof = [0; 64];
            near.read_exact(&mut nonce_and_proof).await.unwrap();
            near.write_all(&nonce_and_proof[32..]).await.unwrap();
        };
        let key = key_from_byte(3);
        let ((), result) = tokio::join!(attacker, authenticate_agent(&mut far, &key));
        assert!(matches!(result, Err(HandshakeError::WrongKey(HandshakeRole::Agent))), "{result:?}");
    });
}

#[test]
fn a_recorded_handshake_cannot_be_replayed() {
    let recorded = block_on(async {
        let (near, mut far) = duplex(1024);
        let (mut tapped, mut tap) = duplex(1024);
        let agent = async {
            authenticate_controller(near, &key_from_byte(4), "n")
                .await
                .unwrap()
                .send_agent_proof()
                .await
                .unwrap()
        };
        let relay = async {
            let mut hello = [0; 42];
            far.read_exact(&mut hello).await.unwrap();
            tapped.write_all(&hello).await.unwrap();
            let mut nonce_and_proof = [0; 64];
            tapped.read_exact(&mut nonce_and_proof).await.unwrap();
            far.write_all(&nonce_and_proof).await.unwrap();
            let mut proof = [0; 32];
            far.read_exact(&mut proof).await.unwrap();
            tapped.write_all(&proof).await.unwrap();
            (hello, proof)
        };
        let key = key_from_byte(4);
        let (_, recorded, result) = tokio::join!(agent, relay, authenticate_agent(&mut tap, &key));
        assert_eq!(result.unwrap(), "n");
        recorded
    });
    block_on(async {
        let (mut near, mut far) = duplex(1024);
        near.write_all(&recorded.0).await.unwrap();
        near.write_all(&recorded.1).await.unwrap();
        authenticate_agent(&mut far, &key_from_byte(4)).await.unwrap_err();
    });
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
            let (mut near, mut far) = duplex(1024);
            near.write_all(&bytes).await.unwrap();
            near.shutdown().await.unwrap();
            assert!(authenticate_agent(&mut far, &key_from_byte(5)).await.is_err());
        });
        _ = Invitation::read(&mut &bytes[..]);
    }

    #[test]
    fn untrusted_invitations_never_panic(
        line in "launch-join-1 [0-9a-zé]{60,66}( [0-9.:\\[\\]]{0,20}){0,20}"
    ) {
        _ = Invitation::from_line(&line);
    }
}
