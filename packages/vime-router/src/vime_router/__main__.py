from vime_router.cli import main

raise SystemExit(main())
