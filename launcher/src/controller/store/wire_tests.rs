use super::*;
use proptest::prelude::*;

fn text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text);
}

/// The bytes of a request.
pub(crate) fn request(request: &Request) -> Vec<u8> {
    let mut out = Vec::new();
    let mut put = |code: u8, texts: &[&[u8]]| {
        out.push(code);
        texts.iter().for_each(|t| text(&mut out, t));
    };
    match request {
        Request::Validate => {
            out.push(0);
            out.extend(MAGIC.to_le_bytes());
        }
        Request::Set(k, v) => put(1, &[k, v]),
        Request::CompareSet(k, old, new) => put(2, &[k, old, new]),
        Request::Get(k) => put(3, &[k]),
        Request::Add(k, n) => {
            put(4, &[k]);
            out.extend(n.to_le_bytes());
        }
        Request::Check(keys) | Request::Wait(keys) | Request::GetMany(keys) => {
            out.push(match request {
                Request::Check(_) => 5,
                Request::Wait(_) => 6,
                _ => 10,
            });
            out.extend((keys.len() as u64).to_le_bytes());
            keys.iter().for_each(|k| text(&mut out, k));
        }
        Request::CountKeys => put(7, &[]),
        Request::Delete(k) => put(8, &[k]),
        Request::Append(k, v) => put(9, &[k, v]),
        Request::SetMany(pairs) => {
            out.push(11);
            out.extend((pairs.len() as u64).to_le_bytes());
            for (k, v) in pairs {
                text(&mut out, k);
                text(&mut out, v);
            }
        }
        Request::CancelWait => put(12, &[]),
        Request::Ping(nonce) => {
            out.push(13);
            out.extend(nonce.to_le_bytes());
        }
        Request::Push(k, v) => put(14, &[k, v]),
        Request::Pop(k) => put(15, &[k]),
        Request::QueueLength(k) => put(16, &[k]),
        Request::ListKeys => put(17, &[]),
        Request::Barrier(k, n) => {
            put(18, &[k]);
            out.extend(n.to_le_bytes());
        }
    }
    out
}

/// Any request over a few short keys.
pub(crate) fn any_request() -> impl Strategy<Value = Request> {
    let key = || "[abc]{0,1}".prop_map(|k| k.into_bytes());
    let value = || prop_oneof!["[0-9]{1,3}", "[a-z]{0,3}"].prop_map(|v| v.into_bytes());
    let keys = || proptest::collection::vec("[abc]{0,1}".prop_map(|k| k.into_bytes()), 0..4);
    prop_oneof![
        Just(Request::Validate),
        (key(), value()).prop_map(|(k, v)| Request::Set(k, v)),
        (key(), value(), value()).prop_map(|(k, a, b)| Request::CompareSet(k, a, b)),
        key().prop_map(Request::Get),
        (key(), any::<i16>()).prop_map(|(k, n)| Request::Add(k, n.into())),
        keys().prop_map(Request::Check),
        keys().prop_map(Request::Wait),
        Just(Request::CountKeys),
        key().prop_map(Request::Delete),
        (key(), value()).prop_map(|(k, v)| Request::Append(k, v)),
        keys().prop_map(Request::GetMany),
        proptest::collection::vec((key(), value()), 0..4).prop_map(Request::SetMany),
        Just(Request::CancelWait),
        any::<u32>().prop_map(Request::Ping),
        (key(), value()).prop_map(|(k, v)| Request::Push(k, v)),
        key().prop_map(Request::Pop),
        key().prop_map(Request::QueueLength),
        Just(Request::ListKeys),
        (key(), 0i64..4).prop_map(|(k, n)| Request::Barrier(k, n)),
    ]
}

#[test]
fn bytes_of_another_protocol_are_rejected() {
    let mut long_key = vec![3];
    long_key.extend((MAX_KEY + 1).to_le_bytes());
    let mut long_value = vec![1];
    text(&mut long_value, b"k");
    long_value.extend(u64::MAX.to_le_bytes());
    let mut many = vec![6];
    many.extend((MAX_KEYS + 1).to_le_bytes());
    let above = |field, length, limit| ClientError::LengthAboveLimit { field, length, limit };
    for (bytes, error) in [
        (vec![19], ClientError::UnknownOperation(19)),
        (vec![255], ClientError::UnknownOperation(255)),
        (vec![0, 1, 2, 3, 4], ClientError::WrongMagic(0x0403_0201)),
        (b"GET / HTTP/1.1".to_vec(), ClientError::UnknownOperation(71)),
        (long_key, above(LengthField::Key, 8193, MAX_KEY)),
        (long_value, above(LengthField::Value, u64::MAX, MAX_VALUE)),
        (many, above(LengthField::KeyCount, 131_073, MAX_KEYS)),
    ] {
        assert_eq!(parse(&bytes), Parsed::Malformed(error));
    }
    let mut most = vec![11];
    most.extend(MAX_KEYS.to_le_bytes());
    assert_eq!(parse(&most), Parsed::Incomplete(9 + 16 * MAX_KEYS as usize), "nothing is allocated early");
}

proptest! {
    #[test]
    fn requests_round_trip_and_incomplete_ones_need_more_bytes(sent in any_request(), rest in "[a-z]{0,3}") {
        let mut bytes = request(&sent);
        let length = bytes.len();
        for cut in 0..length {
            let Parsed::Incomplete(needed) = parse(&bytes[..cut]) else { panic!("{cut} of {length}") };
            prop_assert!(needed > cut && needed <= length, "{} of {} needs {}", cut, length, needed);
        }
        bytes.extend(rest.bytes());
        prop_assert_eq!(parse(&bytes), Parsed::Complete(sent, length));
    }

    #[test]
    fn parsing_never_panics(code in 0u8..20, bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        let bytes = [vec![code], bytes].concat();
        match parse(&bytes) {
            Parsed::Complete(_, length) => prop_assert!(length <= bytes.len()),
            Parsed::Incomplete(needed) => prop_assert!(needed > bytes.len() && needed <= MAX_MESSAGE),
            Parsed::Malformed(_) => {}
        }
    }
}
