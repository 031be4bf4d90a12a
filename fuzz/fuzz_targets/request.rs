//! Request decoding: any octets as each of the three requests.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tributary_shared::protocol::Envelope;

fuzz_target!(|data: &[u8]| {
    let Ok(envelope) = Envelope::read(data) else { return };
    let claimed = envelope.client_id();
    if let Ok(request) = envelope.clone().pull() {
        assert_eq!(Some(request.client_id), claimed);
        assert!((1..=1000).contains(&request.limit) && request.client_generation > 0);
    }
    if let Ok(request) = envelope.clone().rebuild() {
        assert_eq!(Some(request.client_id), claimed);
        assert!((1..=1000).contains(&request.limit) && !request.rebuild_id.is_nil());
    }
    if let Ok(request) = envelope.connect() {
        assert_eq!(Some(request.client_id), claimed);
        assert!(!request.schema.is_fresh() || (request.client_generation.is_none() && !request.schema_reset));
    }
});
