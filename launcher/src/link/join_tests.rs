use super::*;
use proptest::prelude::*;
use tokio::io::duplex;

fn block<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn fixed(byte: u8) -> Key {
    Key([byte; 32])
}

/// Both sides over a pipe; what each came to.
fn meet(agent: Key, controller: Key, name: &str) -> (io::Result<()>, io::Result<String>) {
    block(async {
        let (near, mut far) = duplex(64);
        let join = async {
            let mut stream = introduce(near, &agent, name).await?.confirm().await?;
            stream.write_all(b"then").await
        };
        tokio::join!(join, async {
            let name = admit(&mut far, &controller).await?;
            let mut next = [0; 4];
            far.read_exact(&mut next).await?;
            assert_eq!(&next, b"then", "the control stream begins right behind");
            drop(far);
            Ok(name)
        })
    })
}

#[test]
fn the_same_key_meets_and_another_does_not() {
    for name in ["n1", "", &"x".repeat(255)] {
        let (agent, controller) = meet(fixed(1), fixed(1), name);
        agent.unwrap();
        assert_eq!(controller.unwrap(), name);
    }
    let (agent, controller) = meet(fixed(1), fixed(2), "n1");
    assert_eq!(agent.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    controller.unwrap_err();
    assert!(meet(fixed(1), fixed(1), &"x".repeat(256)).0.is_err(), "a name that doesn't fit");
}

#[test]
fn an_agent_without_the_key_is_not_admitted_even_with_the_controllers_own_answer() {
    block(async {
        let (mut near, mut far) = duplex(1024);
        let stranger = async {
            near.write_all(MAGIC).await.unwrap();
            near.write_all(&[7; 32]).await.unwrap();
            near.write_all(b"\x01n").await.unwrap();
            let mut answer = [0; 64];
            near.read_exact(&mut answer).await.unwrap();
            // the controller's proof, reflected
            near.write_all(&answer[32..]).await.unwrap();
        };
        let key = fixed(3);
        let ((), admitted) = tokio::join!(stranger, admit(&mut far, &key));
        assert_eq!(admitted.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    });
}

#[test]
fn a_recorded_meeting_can_not_be_played_again() {
    let recorded = block(async {
        let (near, mut far) = duplex(1024);
        let (mut tapped, mut tap) = duplex(1024);
        let agent = async { introduce(near, &fixed(4), "n").await.unwrap().confirm().await.unwrap() };
        let relay = async {
            let mut hello = [0; 42];
            far.read_exact(&mut hello).await.unwrap();
            tapped.write_all(&hello).await.unwrap();
            let mut proof = [0; 64];
            tapped.read_exact(&mut proof).await.unwrap();
            far.write_all(&proof).await.unwrap();
            let mut answer = [0; 32];
            far.read_exact(&mut answer).await.unwrap();
            tapped.write_all(&answer).await.unwrap();
            (hello, answer)
        };
        let key = fixed(4);
        let (_, recorded, admitted) = tokio::join!(agent, relay, admit(&mut tap, &key));
        assert_eq!(admitted.unwrap(), "n");
        recorded
    });
    block(async {
        let (mut near, mut far) = duplex(1024);
        near.write_all(&recorded.0).await.unwrap();
        near.write_all(&recorded.1).await.unwrap();
        admit(&mut far, &fixed(4)).await.unwrap_err();
    });
}

#[test]
fn an_invitation_is_a_line() {
    let addresses: Vec<SocketAddr> =
        ["10.0.0.1:77", "[fd00::1]:77"].iter().map(|a| a.parse().unwrap()).collect();
    let invitation = Invitation { key: Key::random().unwrap(), addresses };
    let line = invitation.to_line();
    assert_eq!(Invitation::from_line(&line).as_ref(), Ok(&invitation));
    let bytes = format!("{line}rest").into_bytes();
    let stream = &mut &bytes[..];
    assert_eq!(Invitation::read(stream).unwrap(), invitation);
    assert_eq!(*stream, b"rest");
    assert!(!format!("{invitation:?}").contains(&line[14..78]), "the key isn't printed");
    for wrong in [
        "",
        "launch-join-1",
        &line[..80],
        &line.replace("join-1", "join-2"),
        &line[..78].replace("join-1 ", "join-1 é"),
    ] {
        assert!(Invitation::from_line(wrong).is_err(), "{wrong}");
    }
    let long = vec![b'x'; LONGEST_INVITATION + 2];
    assert!(Invitation::read(&mut &long[..]).is_err());
}

proptest! {
    #[test]
    fn hostile_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        block(async {
            let (mut near, mut far) = duplex(1024);
            near.write_all(&bytes).await.unwrap();
            near.shutdown().await.unwrap();
            assert!(admit(&mut far, &fixed(5)).await.is_err());
        });
        _ = Invitation::read(&mut &bytes[..]);
    }

    #[test]
    fn hostile_invitations_never_panic(line in "launch-join-1 [0-9a-zé]{60,66}( [0-9.:\\[\\]]{0,20}){0,20}") {
        _ = Invitation::from_line(&line);
    }
}
