//! Tests in which malformed and malicious pickles are rejected.
use super::tree::{MEMO_ENTRIES_MAX, VALUES_MAX};
use super::*;
use crate::error::PickleError;
use proptest::prelude::*;

const GLOBALS: &[&[&str]] = &[&["collections.OrderedDict", "torch.Size"]];

/// Parses the pickle `input`, which must be rejected, and returns the error. Panics if the pickle
/// is accepted.
fn expect_rejection(input: &[u8]) -> PickleError {
    parse_pickle(input, GLOBALS).expect_err("rejected")
}

/// Returns the error for a pickle that names the class or function `name`, which is not allowed.
fn forbidden_global_error(name: &str) -> PickleError {
    PickleError::ForbiddenGlobal { name: name.into() }
}

/// Returns the error for a pickle that contains the unsupported opcode `opcode`.
fn unsupported_opcode_error(opcode: char) -> PickleError {
    PickleError::UnsupportedOpcode { opcode: opcode as u8 }
}

#[test]
fn values_of_every_type_are_read_in_order() {
    let input = b"\x80\x02}q\x00(X\x01\x00\x00\x00bK\x07X\x01\x00\x00\x00aJ\xfe\xff\xff\xffX\x01\x00\x00\x00c\x8a\x02\x00\x80X\x01\x00\x00\x00dG\x3f\xf8\x00\x00\x00\x00\x00\x00X\x01\x00\x00\x00e\x88N\x86X\x01\x00\x00\x00fh\x00)Ru.";
    // the value of `f` is the call of a dict, which is no function
    assert_eq!(
        expect_rejection(input),
        PickleError::WrongType("calls a value that is not a class or function")
    );
    let input = b"\x80\x02}q\x00(X\x01\x00\x00\x00bK\x07X\x01\x00\x00\x00aJ\xfe\xff\xff\xffX\x01\x00\x00\x00c\x8a\x02\x00\x80X\x01\x00\x00\x00dG\x3f\xf8\x00\x00\x00\x00\x00\x00X\x01\x00\x00\x00e\x88N\x86X\x01\x00\x00\x00fctorch\nSize\nK\x02K\x03\x86\x85Ru.";
    let tree = parse_pickle(input, GLOBALS).expect("sound");
    let root = tree.root_value();
    let keys: Vec<&str> = root.as_pairs().expect("a dict").filter_map(|(k, _)| k.as_str()).collect();
    assert_eq!(keys, ["b", "a", "c", "d", "e", "f"], "dicts keep their order");
    assert_eq!(root.get("b").and_then(PickleView::as_int), Some(7));
    assert_eq!(root.get("a").and_then(PickleView::as_int), Some(-2));
    assert_eq!(root.get("c").and_then(PickleView::as_int), Some(-32768));
    let pair = root.get("e").and_then(PickleView::as_items).expect("a tuple");
    assert_eq!((pair.iter().count(), pair.get(0).map(PickleView::to_json)), (2, Some(true.into())));
    let (class, args, _) = root.get("f").and_then(PickleView::as_object).expect("an object");
    let sizes = args
        .as_items()
        .and_then(|a| a.get(0))
        .and_then(PickleView::as_items)
        .and_then(PickleItems::to_counts);
    assert_eq!((class, sizes), ("torch.Size", Some(vec![2, 3])));
    assert_eq!(root.to_json()["d"], 1.5);
}

#[test]
fn forbidden_globals_are_rejected_by_name() {
    for input in [
        &b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R."[..],
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
        b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n.",
    ] {
        assert_eq!(expect_rejection(input), forbidden_global_error("os.system"));
    }
    // a name that begins with an allowed name is forbidden, too
    assert_eq!(expect_rejection(b"ctorch\nSizes\n."), forbidden_global_error("torch.Sizes"));
    assert_eq!(expect_rejection(b"ctorch.Size\n\n."), forbidden_global_error("torch.Size."));
    assert_eq!(expect_rejection(b"cbuiltins\neval\n."), forbidden_global_error("builtins.eval"));
    assert_eq!(expect_rejection(b"(S'id'\nios\nsystem\n."), unsupported_opcode_error('S'));
    assert_eq!(expect_rejection(b"(ios\nsystem\n."), unsupported_opcode_error('i'));
}

#[test]
fn values_that_contain_themselves_are_rejected() {
    for input in [
        &b"\x80\x02]q\x00h\x00a."[..],                       // a list in itself
        b"\x80\x02}q\x00K\x01h\x00s.",                       // a dict in itself
        b"\x80\x02]q\x00]q\x01h\x00ah\x01\x86h\x00h\x01a0.", // two lists in each other
        b"\x80\x02ctorch\nSize\n)Rq\x00h\x00b.",             // an object as its own state
    ] {
        assert_eq!(expect_rejection(input), PickleError::Cycle);
    }
}

#[test]
fn deep_nesting_is_rejected_in_every_form() {
    let mut lists = vec![b']'; 1000];
    lists.extend([b'a'; 999]);
    lists.push(b'.');
    assert_eq!(expect_rejection(&lists), PickleError::TooDeep);
    let mut tuples = vec![b')'];
    tuples.extend([0x85; 100_000]);
    tuples.push(b'.');
    assert_eq!(expect_rejection(&tuples), PickleError::TooDeep);
    // a deep value that the pickle contains twice: near the root, and in another deep value
    let mut both = vec![b']', b')'];
    both.extend([0x85; 70]);
    both.extend([b'q', 0, b'a', b'h', 0]);
    both.extend([0x85; 70]);
    both.extend([b'a', b'.']);
    assert_eq!(expect_rejection(&both), PickleError::TooDeep);
}

#[test]
fn lengths_beyond_the_input_are_rejected_before_memory_is_allocated() {
    let tera = (1u64 << 40).to_le_bytes();
    for op in [0x8du8, 0x8e, 0x96, 0x95] {
        let input = [&[op][..], &tera, b"."].concat();
        let claimed = 1 << 40;
        assert!(
            matches!(expect_rejection(&input), PickleError::Truncated { claimed: c, .. } if c == claimed),
            "{op}"
        );
    }
    let truncated = PickleError::Truncated { at: 5, claimed: 4_294_967_295, left: 3 };
    assert_eq!(expect_rejection(b"X\xff\xff\xff\xffab."), truncated);
    assert_eq!(expect_rejection(b"\x8b\xff\xff\xff\xffab."), truncated);
}

/// Returns a pickle of `n + 1` lists, each of which holds the previous one twice. These are 2^(n +
/// 1) - 1 lists if every use is counted.
fn doubling_pickle(n: u8) -> Vec<u8> {
    let mut input = b"]q\x00".to_vec();
    for i in 0..n {
        input.extend([b']', b'(', b'h', i, b'h', i, b'e', b'q', i + 1]);
    }
    input.push(b'.');
    input
}

#[test]
fn shared_values_are_not_copied_and_their_uses_are_limited() {
    let tree = parse_pickle(&doubling_pickle(23), GLOBALS).expect("2^24 - 1 lists");
    assert_eq!(tree.nodes.len(), 24);
    let shown = tree.root_value().to_json().to_string();
    assert!(shown.len() < 2_000_000, "{}", shown.len());
    for n in [24, 25, 100] {
        let limit = "values, counting each use of a shared one";
        let error = expect_rejection(&doubling_pickle(n));
        assert!(matches!(error, PickleError::Limit { what, .. } if what == limit), "{n}: {error}");
    }
    // a long text that is used often counts by its length
    let mut texts = vec![b']', b'X', 0, 0, 16, 0];
    texts.extend(vec![b'a'; 1 << 20]);
    texts.extend(*b"q\x000(");
    texts.extend([b'h', 0].repeat(200));
    texts.extend(*b"e.");
    assert!(matches!(expect_rejection(&texts), PickleError::Limit { .. }));
}

#[test]
fn copies_of_a_shared_list_are_counted() {
    // 2^20 pairs, copied by one call of OrderedDict after another
    let mut input = b"(".to_vec();
    input.extend(b"NN\x86".repeat(1 << 20));
    input.extend(b"l\x85q\x00]");
    input.extend(b"ccollections\nOrderedDict\nh\x00Ra".repeat(6));
    input.push(b'.');
    assert_eq!(expect_rejection(&input), PickleError::Limit { what: "values", limit: VALUES_MAX });
}

#[test]
fn memo_entries_are_limited() {
    let store = |index: u32| [&b"Nr"[..], &index.to_le_bytes(), b"."].concat();
    assert!(parse_pickle(&store(MEMO_ENTRIES_MAX as u32 - 1), GLOBALS).is_ok());
    let error = PickleError::Limit { what: "memo entries", limit: MEMO_ENTRIES_MAX };
    assert_eq!(expect_rejection(&store(MEMO_ENTRIES_MAX as u32)), error);
    assert_eq!(expect_rejection(&store(u32::MAX)), error);
    // an entry between two others was never stored
    assert_eq!(expect_rejection(b"Nq\x00q\x02h\x01."), PickleError::UnknownMemoEntry { index: 1 });
}

#[test]
fn too_many_values_are_rejected() {
    let limit = |what| PickleError::Limit { what, limit: VALUES_MAX };
    assert_eq!(expect_rejection(&vec![b'N'; VALUES_MAX + 2]), limit("values"));
    assert_eq!(expect_rejection(&vec![b'('; VALUES_MAX + 2]), limit("marks"));
}

#[test]
fn invalid_opcode_sequences_are_rejected_with_the_reason() {
    use PickleError::*;
    let truncated = |at| Truncated { at, claimed: 1, left: 0 };
    for (input, expected) in [
        (&b""[..], truncated(0)),
        (b".", StackUnderflow),
        (b"N", truncated(1)),
        (b"N.N", TrailingData { end: 2, size: 3 }),
        (b"(N1.", StackUnderflow),
        (b"N(0.", StackUnderflow),
        (b"h\x05.", UnknownMemoEntry { index: 5 }),
        (b"}Ns.", StackUnderflow),
        (b"}(Nu.", KeyWithoutValue),
        (b"NNa.", WrongType("adds items to a value that is not a container")),
        (b")Na.", WrongType("appends to a value that is not a list")),
        (b"]NNs.", WrongType("sets items of a value that is not a dict")),
        (b"\x80\x09N.", UnsupportedProtocol { protocol: 9 }),
        (b"NNR.", WrongType("calls a value that is not a class or function")),
        (
            b"ccollections\nOrderedDict\nK\x01\x85R.",
            WrongType("makes an OrderedDict from values that are not pairs"),
        ),
    ] {
        assert_eq!(expect_rejection(input), expected);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(input in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse_pickle(&input, GLOBALS);
    }

    #[test]
    fn arbitrary_opcodes_do_not_panic(ops in proptest::collection::vec(proptest::sample::select(&b"()]}Nlt\x85\x86\x87aesu02q\x00h\x00R\x81bQ\x94\x8f\x90."[..]), 0..120)) {
        if let Ok(tree) = parse_pickle(&ops, GLOBALS) {
            let _ = tree.root_value().to_json();
        }
    }
}

/// Returns the pickle (the member `data.pkl`) of a torch file in the test data. `path` is relative
/// to `tests/golden`.
fn read_golden_pickle(path: &str) -> Vec<u8> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path);
    let file = std::fs::read(path).expect("there");
    let members = crate::codec::zip::read_members(file.len() as u64, |at, out| {
        out.copy_from_slice(&file[at as usize..at as usize + out.len()]);
        Ok(())
    });
    let member =
        members.expect("sound").into_iter().find(|m| m.name.ends_with("data.pkl")).expect("a pickle");
    file[member.data.start as usize..member.data.end as usize].to_vec()
}

#[test]
fn mutated_golden_pickles_do_not_panic() {
    let globals: &[&[&str]] = &[crate::codec::torch_file::TENSOR_GLOBALS, &["torch.float16"]];
    let mut runner =
        proptest::test_runner::TestRunner::new(ProptestConfig { cases: 400, ..Default::default() });
    for path in [
        "z3_frozen/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "z1_tied/global_step3/mp_rank_00_model_states.pt",
    ] {
        let sound = read_golden_pickle(path);
        parse_pickle(&sound, globals).expect("sound");
        let flips = proptest::collection::vec((any::<usize>(), any::<u8>()), 1..8);
        let ran = runner.run(&flips, |flips| {
            let mut input = sound.clone();
            for (at, value) in flips {
                let at = at % input.len();
                input[at] = value;
            }
            if let Ok(tree) = parse_pickle(&input, globals) {
                let _ = tree.root_value().to_json();
            }
            Ok(())
        });
        ran.expect("no panic");
    }
}
