//! Tests of parsing requests to the rendezvous store, and of encoding replies.
use super::*;
use proptest::prelude::*;

/// Appends a key or value to `out`: its length as a u64, then its bytes.
fn append_text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text);
}

/// Encodes a request to the bytes that torch's client sends.
pub(crate) fn encode_request(request: &StoreRequest) -> Vec<u8> {
    let mut out = Vec::new();
    let mut put = |code: u8, texts: &[&[u8]]| {
        out.push(code);
        texts.iter().for_each(|t| append_text(&mut out, t));
    };
    match request {
        StoreRequest::Validate => {
            out.push(0);
            out.extend(HANDSHAKE_MAGIC.to_le_bytes());
        }
        StoreRequest::Set(k, v) => put(1, &[k, v]),
        StoreRequest::CompareSet(k, old, new) => put(2, &[k, old, new]),
        StoreRequest::Get(k) => put(3, &[k]),
        StoreRequest::Add(k, n) => {
            put(4, &[k]);
            out.extend(n.to_le_bytes());
        }
        StoreRequest::Check(keys) | StoreRequest::Wait(keys) | StoreRequest::GetMany(keys) => {
            out.push(match request {
                StoreRequest::Check(_) => 5,
                StoreRequest::Wait(_) => 6,
                _ => 10,
            });
            out.extend((keys.len() as u64).to_le_bytes());
            keys.iter().for_each(|k| append_text(&mut out, k));
        }
        StoreRequest::CountKeys => put(7, &[]),
        StoreRequest::Delete(k) => put(8, &[k]),
        StoreRequest::Append(k, v) => put(9, &[k, v]),
        StoreRequest::SetMany(pairs) => {
            out.push(11);
            out.extend((pairs.len() as u64).to_le_bytes());
            for (k, v) in pairs {
                append_text(&mut out, k);
                append_text(&mut out, v);
            }
        }
        StoreRequest::CancelWait => put(12, &[]),
        StoreRequest::Ping(nonce) => {
            out.push(13);
            out.extend(nonce.to_le_bytes());
        }
        StoreRequest::Push(k, v) => put(14, &[k, v]),
        StoreRequest::Pop(k) => put(15, &[k]),
        StoreRequest::QueueLength(k) => put(16, &[k]),
        StoreRequest::ListKeys => put(17, &[]),
        StoreRequest::Barrier(k, n) => {
            put(18, &[k]);
            out.extend(n.to_le_bytes());
        }
    }
    out
}

/// Generates a random request of any kind, over a few keys of at most one character.
pub(crate) fn any_request() -> impl Strategy<Value = StoreRequest> {
    let key = || "[abc]{0,1}".prop_map(|k| k.into_bytes());
    let value = || prop_oneof!["[0-9]{1,3}", "[a-z]{0,3}"].prop_map(|v| v.into_bytes());
    let keys = || proptest::collection::vec("[abc]{0,1}".prop_map(|k| k.into_bytes()), 0..4);
    prop_oneof![
        Just(StoreRequest::Validate),
        (key(), value()).prop_map(|(k, v)| StoreRequest::Set(k, v)),
        (key(), value(), value()).prop_map(|(k, a, b)| StoreRequest::CompareSet(k, a, b)),
        key().prop_map(StoreRequest::Get),
        (key(), any::<i16>()).prop_map(|(k, n)| StoreRequest::Add(k, n.into())),
        keys().prop_map(StoreRequest::Check),
        keys().prop_map(StoreRequest::Wait),
        Just(StoreRequest::CountKeys),
        key().prop_map(StoreRequest::Delete),
        (key(), value()).prop_map(|(k, v)| StoreRequest::Append(k, v)),
        keys().prop_map(StoreRequest::GetMany),
        proptest::collection::vec((key(), value()), 0..4).prop_map(StoreRequest::SetMany),
        Just(StoreRequest::CancelWait),
        any::<u32>().prop_map(StoreRequest::Ping),
        (key(), value()).prop_map(|(k, v)| StoreRequest::Push(k, v)),
        key().prop_map(StoreRequest::Pop),
        key().prop_map(StoreRequest::QueueLength),
        Just(StoreRequest::ListKeys),
        (key(), 0i64..4).prop_map(|(k, n)| StoreRequest::Barrier(k, n)),
    ]
}

#[test]
fn bytes_of_another_protocol_are_rejected() {
    let mut long_key = vec![3];
    long_key.extend((MAX_KEY_BYTES + 1).to_le_bytes());
    let mut long_value = vec![1];
    append_text(&mut long_value, b"k");
    long_value.extend(u64::MAX.to_le_bytes());
    let mut many = vec![6];
    many.extend((MAX_KEYS_PER_REQUEST + 1).to_le_bytes());
    let above = |field, length, limit| StoreClientError::LengthAboveLimit { field, length, limit };
    for (bytes, error) in [
        (vec![19], StoreClientError::UnknownOperation(19)),
        (vec![255], StoreClientError::UnknownOperation(255)),
        (vec![0, 1, 2, 3, 4], StoreClientError::WrongMagic(0x0403_0201)),
        (b"GET / HTTP/1.1".to_vec(), StoreClientError::UnknownOperation(71)),
        (long_key, above(RequestLengthField::Key, 8193, MAX_KEY_BYTES)),
        (long_value, above(RequestLengthField::Value, u64::MAX, MAX_VALUE_BYTES)),
        (many, above(RequestLengthField::KeyCount, 131_073, MAX_KEYS_PER_REQUEST)),
    ] {
        assert_eq!(parse_request(&bytes), RequestParseOutcome::Malformed(error));
    }
    let mut most = vec![11];
    most.extend(MAX_KEYS_PER_REQUEST.to_le_bytes());
    assert_eq!(
        parse_request(&most),
        RequestParseOutcome::Incomplete(9 + 16 * MAX_KEYS_PER_REQUEST as usize),
        "nothing is allocated early"
    );
}

proptest! {
    #[test]
    fn requests_round_trip_and_incomplete_ones_need_more_bytes(sent in any_request(), rest in "[a-z]{0,3}") {
        let mut bytes = encode_request(&sent);
        let length = bytes.len();
        for cut in 0..length {
            let RequestParseOutcome::Incomplete(needed) = parse_request(&bytes[..cut]) else { panic!("{cut} of {length}") };
            prop_assert!(needed > cut && needed <= length, "{} of {} needs {}", cut, length, needed);
        }
        bytes.extend(rest.bytes());
        prop_assert_eq!(parse_request(&bytes), RequestParseOutcome::Complete(sent, length));
    }

    #[test]
    fn parsing_never_panics(code in 0u8..20, bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        let bytes = [vec![code], bytes].concat();
        match parse_request(&bytes) {
            RequestParseOutcome::Complete(_, length) => prop_assert!(length <= bytes.len()),
            RequestParseOutcome::Incomplete(needed) => prop_assert!(needed > bytes.len() && needed <= MAX_MESSAGE_BYTES),
            RequestParseOutcome::Malformed(_) => {}
        }
    }
}
